import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from deltabus.bus.errors import CorruptPayloadError, SchemaMismatchError, UsageError
from deltabus.codecs.checkpoint import INDEX_NAME, load_checkpoint, save_checkpoint
from deltabus.codecs.state import as_integers, collect


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "flags": torch.tensor([True, False, True]),
        "a.bf16": torch.randn(7, 5, generator=generator).bfloat16(),
        "b.f16": torch.randn(9, generator=generator).half(),
        "c.bf16": torch.randn(6, 4, generator=generator).bfloat16().t(),
        "empty": torch.empty(0, 3),
        "f32": torch.randn(33, generator=generator),
        "fp8": torch.randn(11, generator=generator).to(torch.float8_e4m3fn),
        "ints": torch.arange(11),
        "scalar": torch.tensor(5.0),
        "z.f64": torch.randn(3, generator=generator).double(),
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert as_integers(found[name]).tolist() == as_integers(tensor).tolist()


def save(directory, source, **options):
    state = collect(source, segment_elements=16)
    return save_checkpoint(directory, state.schema, state.read, **options)


@pytest.mark.parametrize("shard_bytes", [1, 60, 200, 10**9])
def test_round_trip(tmp_path, shard_bytes):
    files = save(tmp_path / "new" / "model", tensors(), shard_bytes=shard_bytes)
    assert sorted(files) == sorted((tmp_path / "new" / "model").iterdir())
    assert (len(files) > 2) == (shard_bytes < 10**9)
    assert_same(load_checkpoint(tmp_path / "new" / "model"), tensors())
    shards = [file for file in files if file.suffix == ".safetensors"]
    assert_same(load_checkpoint(shards), tensors())
    # The library itself reads them too.
    assert_same({name: tensor for file in shards for name, tensor in load_file(file).items()}, tensors())


def test_shards_are_named_and_indexed_as_others_expect(tmp_path):
    files = save(tmp_path, {"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(1)}, shard_bytes=16)
    assert [file.name for file in files] == [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), INDEX_NAME]
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert index["metadata"] == {"total_size": 36}
    assert index["weight_map"]["b"] == "model-00002-of-00003.safetensors"


def test_tensors_begin_at_multiples_of_their_width(tmp_path):
    save(tmp_path, tensors())
    for tensor in load_checkpoint(tmp_path).values():
        assert tensor.data_ptr() % tensor.element_size() == 0


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path):
    model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["embed"].weight
    state = collect(model)
    (file,) = save_checkpoint(tmp_path, state.schema, state.read)
    assert list(load_file(file)) == ["embed.weight"]
    assert collect(load_checkpoint(tmp_path)).schema == state.schema


def tied_models():
    """Tiny models of several families, whose heads are their embeddings."""
    words = {"vocab_size": 32, "tie_word_embeddings": True}
    sizes = words | {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=1, head_dim=4)),
        "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**words, n_embd=8, n_layer=1, n_head=2)),
        "bert": lambda: BertForMaskedLM(BertConfig(**sizes)),
        "t5": lambda: T5ForConditionalGeneration(
            T5Config(**words, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2)
        ),
        "bart": lambda: BartForConditionalGeneration(
            BartConfig(**words, **layers, d_model=8, encoder_ffn_dim=8, decoder_ffn_dim=8)
        ),
    }


@pytest.mark.parametrize("kind", sorted(tied_models()))
@pytest.mark.parametrize("shard_bytes", [1, 10**9])
def test_tied_tensors_are_stored_under_the_names_that_transformers_gives_them(tmp_path, kind, shard_bytes):
    torch.manual_seed(0)
    model = tied_models()[kind]()
    assert any(spec.aliases for spec in collect(model).schema.tensors)
    model.save_pretrained(tmp_path / "theirs")
    save(tmp_path / "ours", model, shard_bytes=shard_bytes)
    assert stored(tmp_path / "ours") == stored(tmp_path / "theirs")
    if shard_bytes == 1:
        index = json.loads((tmp_path / "ours" / INDEX_NAME).read_text())
        assert index["weight_map"].keys() == stored(tmp_path / "theirs")
    model.config.save_pretrained(tmp_path / "ours")
    loaded, told = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(told.values())
    assert_same(loaded.state_dict(), model.state_dict())


def stored(directory):
    return {name for file in directory.glob("*.safetensors") for name in load_file(file)}


def test_writing_to_a_loaded_checkpoint_leaves_the_file_alone(tmp_path):
    save(tmp_path, {"a": torch.zeros(4)})
    load_checkpoint(tmp_path)["a"].add_(1)
    assert load_checkpoint(tmp_path)["a"].tolist() == [0] * 4


def test_loaded_checkpoints_are_mapped_and_not_read(tmp_path):
    (file,) = save(tmp_path, {"a": torch.zeros(1 << 20)})
    tensor = load_checkpoint(file)["a"]
    with open("/proc/self/maps") as maps:  # noqa: PTH123 - the file of a process, not of the tree
        spans = [line.split()[0].split("-") for line in maps if line.rstrip().endswith(str(file))]
    assert any(int(start, 16) <= tensor.data_ptr() < int(stop, 16) for start, stop in spans)


def test_a_directory_without_an_index_is_all_its_files(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.zeros(2)}, tmp_path / "two.safetensors")
    assert load_checkpoint(str(tmp_path)).keys() == {"a", "b"}


def test_wrong_sources_are_clear_errors(tmp_path):
    with pytest.raises(UsageError, match="holds no safetensors"):
        load_checkpoint(tmp_path)
    with pytest.raises(UsageError, match=r"no file .*missing\.safetensors"):
        load_checkpoint(tmp_path / "missing.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "two.safetensors")
    with pytest.raises(SchemaMismatchError, match=r"'a' is in .*two\.safetensors and in a file before it"):
        load_checkpoint(tmp_path)


def test_truncated_files_are_named(tmp_path):
    (file,) = save(tmp_path, tensors())
    data = file.read_bytes()
    for size in (0, 7, 8, 40, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(CorruptPayloadError, match=r"model\.safetensors is truncated"):
            load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "no index"),
        ("[]", "no index"),
        ('{"weight_map": {"a": 1}}', "no index"),
        ('{"weight_map": {"a": "../other.safetensors"}}', "outside of its directory"),
        ('{"weight_map": {"a": "gone.safetensors"}}', r"gone\.safetensors, which is not there"),
    ],
)
def test_broken_indices_are_named(tmp_path, text, what):
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(CorruptPayloadError, match=what):
        load_checkpoint(tmp_path)


def test_an_existing_checkpoint_is_not_touched(tmp_path):
    save(tmp_path, {"a": torch.zeros(1)})
    with pytest.raises(UsageError, match="holds a checkpoint already"):
        save(tmp_path, {"a": torch.ones(1)})
    assert load_checkpoint(tmp_path)["a"].tolist() == [0]


def test_wrong_calls(tmp_path):
    with pytest.raises(UsageError, match="0 bytes"):
        save(tmp_path, {"a": torch.zeros(1)}, shard_bytes=0)
    with pytest.raises(UsageError, match="__metadata__"):
        save(tmp_path, {"__metadata__": torch.zeros(1)})


@pytest.mark.parametrize("call", ["fsync", "read"])
def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch, call):
    state = collect(tensors(), segment_elements=16)

    def full(*_):
        raise OSError(28, "No space left on device")

    if call == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path, state.schema, full if call == "read" else state.read)
    assert not list(tmp_path.iterdir())
