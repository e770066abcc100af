"""Real trainers with the callback: `python trainer_runs.py DIRECTORY`; prints what each run came to as JSON.

In a process of its own, because the libraries take seconds to load, and warn.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

from deltabus import Publisher, Subscriber
from deltabus.adapters import adapter_name, is_adapter
from deltabus.bus.errors import AccessDeniedError, PublishError, UsageError
from deltabus.cli.pull import pull_version
from deltabus.cli.topic import read_topic
from deltabus.codecs.checkpoint import load_checkpoint
from deltabus.codecs.state import as_integers
from deltabus.following import follow
from deltabus.integrations.peft import adapter_metadata, adapter_tensors, base_tensors
from deltabus.integrations.transformers import DeltabusCallback
from deltabus.transports.file import FileTransport

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(29))]
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def tiny_model():
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def tiny_tokenizer():
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def arguments(root, **options):
    return TrainingArguments(
        output_dir=str(root / "out"),
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=True,
        **options,
    )


def rows(count=12):
    ids = torch.randint(3, len(WORDS), (count, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def ints(tensors):
    return {name: as_integers(tensor) for name, tensor in tensors.items()}


def same(ours, theirs):
    ours, theirs = ints(ours), ints(theirs)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def newest(url):
    engine = {name: torch.zeros_like(t) for name, t in tiny_model().bfloat16().state_dict().items()}
    updates = Subscriber(url, idle_timeout=60).sync()
    update = next(updates)
    update.apply(engine)
    updates.close()
    return engine, update


def log_of(url):
    return [(message.kind, message.step, message.epoch) for message in read_topic(str(url)).messages]


def train_and_resume(root):
    """Train with checkpoints and evaluations; resume from an older one, and end."""
    url, callbacks = root / "topic", []

    def trainer(steps):
        options = {"dtype": torch.bfloat16, "anchor": "never", "skips": "off", "on_busy": "wait", "workers": 1}
        callbacks.append(DeltabusCallback(url, every=2, on_evaluate=True, **options))
        settings = arguments(
            root, max_steps=steps, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=3
        )
        return Trainer(tiny_model(), settings, train_dataset=rows(), eval_dataset=rows(4), callbacks=[callbacks[-1]])

    first = trainer(5)
    first.train()
    before = log_of(url)
    state, update = newest(url)
    exact = same(state, {name: t.bfloat16() for name, t in first.model.state_dict().items()})
    second = trainer(6)
    second.train(resume_from_checkpoint=str(root / "out" / "checkpoint-4"))
    state, _ = newest(url)
    exact &= same(state, {name: t.bfloat16() for name, t in second.model.state_dict().items()})
    return {"exact": exact, "before": before, "after": log_of(url)[len(before) :], "step": update.step}


def train_experts(root):
    """Train a mixture of experts, whose checkpoints have other names than the model, and publish it by both."""
    set_seed(0)
    sizes = {"vocab_size": len(WORDS), "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts))
    callbacks = [DeltabusCallback(root / names, names=names, workers=1) for names in ("checkpoint", "model")]
    Trainer(model, arguments(root, max_steps=2), train_dataset=rows(), callbacks=callbacks).train()
    model.save_pretrained(root / "experts")
    expected = {"checkpoint": load_checkpoint(root / "experts"), "model": model.state_dict()}
    found = {}
    for names, tensors in expected.items():
        pull_version(str(root / names), root / f"pulled-{names}")
        found[names] = same(load_checkpoint(root / f"pulled-{names}"), tensors)
    return {**found, "differ": expected["checkpoint"].keys() != expected["model"].keys()}


def fail(root):
    """Train while the bus refuses; once it may end training, and once not."""
    put, ended = FileTransport.put, []

    async def refuse(self, key, data):
        raise AccessDeniedError(f"{self.url} refuses")

    FileTransport.put = refuse
    try:
        for on_failure in ("log", "raise"):
            callback = DeltabusCallback(root / on_failure, on_failure=on_failure, workers=1)
            trainer = Trainer(tiny_model(), arguments(root, max_steps=3), train_dataset=rows(), callbacks=[callback])
            try:
                trainer.train()
                ended.append(trainer.state.global_step)
            except Exception as error:
                ended.append(type(error).__name__)
                with suppress(PublishError):
                    callback.close()
    finally:
        FileTransport.put = put
    return ended


def grpo(root):
    """Train an adapter with TRL, publish it alone, and load what a directory has with PEFT."""
    url, out = root / "adapter", root / "adapters"
    settings = GRPOConfig(
        output_dir=str(root / "grpo"),
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=4,
        max_steps=2,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
    )
    trainer = GRPOTrainer(
        tiny_model(),
        reward_funcs=lambda completions, **kwargs: [float("w5" in text) + len(text) / 100 for text in completions],
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "w1 w2"}, {"prompt": "w3 w4"}]),
        processing_class=tiny_tokenizer(),
        peft_config=LORA,
        callbacks=[DeltabusCallback(url, adapter="default", workers=1)],
    )
    trainer.train()
    (done,) = follow(url, out, form="adapter", once=True, idle_timeout=60)
    trainer.model.save_pretrained(root / "saved")
    loaded = PeftModel.from_pretrained(tiny_model(), out / "current")
    ours, theirs = (
        {name: tensor for name, tensor in model.state_dict().items() if is_adapter(name)}
        for model in (loaded, trainer.model)
    )
    as_saved = load_checkpoint(root / "saved" / "adapter_model.safetensors")
    renamed = {adapter_name(name): tensor for name, tensor in theirs.items()}
    return {
        "step": done.step,
        "loaded": same(ours, theirs),
        "files": same(load_checkpoint(out / "current"), as_saved),
        "names": same(renamed, as_saved),
        "elements": done.total == sum(tensor.numel() for tensor in as_saved.values()),
    }


def base_and_adapter(root):
    """Publish a base model and its adapter as one version; a new model of both computes what the trained one does."""
    url, out = root / "both", root / "both-out"
    set_seed(1)
    model = get_peft_model(tiny_model(), LORA)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    with Publisher(url, workers=1) as publisher:
        state = {**base_tensors(model), **adapter_tensors(model)}
        publisher.publish(1, state, metadata=adapter_metadata(model)).result(60)
    list(follow(url, out, form="adapter", once=True, idle_timeout=60))
    base = tiny_model()
    base.load_state_dict(load_checkpoint(out / "current" / "base"))
    engine = PeftModel.from_pretrained(base, out / "current")
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        ours, theirs = (m.eval()(input_ids=ids).logits for m in (engine, model))
    try:
        adapter_tensors(model, "another")
    except UsageError as error:
        refused = "default" in str(error)
    return {"logits": torch.equal(as_integers(ours), as_integers(theirs)), "refused": refused}


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    found = {work.__name__: work(place) for work in (train_and_resume, train_experts, fail, grpo, base_and_adapter)}
    print(json.dumps(found))
