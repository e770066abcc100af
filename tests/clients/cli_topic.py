"""A real topic on disk, with what every version holds, and ways to damage it."""

from __future__ import annotations

import dataclasses
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from deltabus.bus.message import Message, decode_message, encode_message
from deltabus.codecs.checkpoint import load_checkpoint
from deltabus.codecs.state import as_integers
from deltabus.publisher import Publisher

States = dict[int, dict[str, Tensor]]


class Net(nn.Module):
    """A few layers, two of them tied, of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 12, dtype=torch.bfloat16)
        self.hidden = nn.Linear(12, 12, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(12, dtype=torch.float32)
        self.head = nn.Linear(12, 50, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight

    def move(self) -> None:
        """Change some of the weights, as a step of training does."""
        with torch.no_grad():
            for weight in self.parameters():
                chosen = torch.rand(weight.shape) < 0.2
                weight[chosen] = weight[chosen] * 1.02 + 0.001


@dataclass(frozen=True)
class Topic:
    """A topic in a directory.

    Attributes:
        path: The directory.
        states: The weights of each version, as integers.
    """

    path: Path
    states: States

    @property
    def url(self) -> str:
        return self.path.as_uri()

    def copy(self, path: Path) -> Topic:
        shutil.copytree(self.path, path)
        return dataclasses.replace(self, path=path)

    @property
    def records(self) -> list[Path]:
        return sorted((self.path / "logs" / "trainer").iterdir())

    @property
    def messages(self) -> list[Message]:
        return [decode_message(record.read_bytes()) for record in self.records]

    def rewrite(self, position: int, **fields: object) -> None:
        """Put a changed message in a record's place, with a checksum that fits."""
        changed = {name: getattr(self.messages[position], name) for name in Message.__struct_fields__} | fields
        self.records[position].write_bytes(encode_message(Message(**changed)))

    def blob(self, position: int) -> Path:
        return self.path / self.messages[position].blobs[0].key


def as_ints(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: as_integers(tensor).clone() for name, tensor in tensors.items()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def pulled(directory: Path) -> dict[str, Tensor]:
    return as_ints(load_checkpoint(directory))


def make_topic(path: Path, anchor: str | int = 2) -> Topic:
    """Publish two epochs of four steps; after the first, deltas with anchors beside some of them."""
    torch.manual_seed(7)
    model, states = Net(), {}
    for epoch in range(2):
        with Publisher(path, on_busy="wait", have=model if epoch else None, anchor=anchor, workers=1) as publisher:
            for step in range(4):
                model.move()
                published = publisher.publish(epoch * 4 + step, model, metadata={"note": "[red]a"}).result(60)
                states[published.version] = as_ints(dict(model.state_dict()))
    return Topic(path, states)


def one_line(stderr: str, *words: str) -> bool:
    """Return whether this is one error on one line, with these words in it."""
    return bool(re.fullmatch(r"error: [^\n]+\n", stderr)) and all(word in stderr for word in words)
