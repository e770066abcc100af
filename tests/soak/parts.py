"""The processes of the soak: a trainer that goes on until it is told to end, a reader that follows, one who prunes.

    OPENBLAS_NUM_THREADS=1 python parts.py      as `tests/clients/scenario.py`, which this adds parts to

Every message says the fingerprint of its bits, so that whoever applies it can compare.
"""

import asyncio
import sys
import zlib
from itertools import count
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from deltabus import Publisher, Subscriber
from deltabus.bus.errors import FencedError
from deltabus.bus.pruner import Pruner
from deltabus.bus.retention import Retention
from deltabus.transports import open_transport

sys.path.append(str(Path(__file__).parents[1] / "clients"))
import scenario
from support import fingerprint, train

_ANCHORS = 12
_RETENTION = Retention(keep_anchors=1, grace=2.0)
_SAVES = 5
_SHARE = 0.01


def save(path, model, **words):
    """Save a model as one file, at once."""
    # A clone of each, because the file takes no tensors that share their memory.
    held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fresh = path.with_name(f"{path.name}-{words['life']}")
    save_file(held, fresh, {name: str(word) for name, word in words.items()})
    fresh.replace(path)


def load(path, model):
    """Fill a model from its file, and return what was said with it; None if there is none."""
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        return file.metadata()


def run_trainer(url, directory, life):
    """Publish from the last checkpoint on until there is a file called `stop`, or another trainer takes over."""
    directory = Path(directory)
    model = scenario.new_model()
    words = load(directory / "checkpoint", model)
    begin = int(words["step"]) + 1 if words else 0
    try:
        with Publisher(
            url,
            have=model if words else None,
            on_busy="wait",
            anchor=_ANCHORS,
            retention=_RETENTION,
            workers=1,
            timeout=scenario.LIMIT,
        ) as publisher:
            for step in count(begin):
                train(model, zlib.crc32(f"{life} {step}".encode()), _SHARE)
                metadata = {"bits": fingerprint(model)}
                if (directory / "stop").exists():
                    metadata["last"] = "yes"
                published = publisher.publish(step, model, metadata=metadata).result(scenario.LIMIT)
                scenario.tell(published.version, step, metadata["bits"])
                if "last" in metadata:
                    return
                if step % _SAVES == 0:
                    save(directory / "checkpoint", model, step=step, life=life)
    except FencedError:
        scenario.tell("fenced")


def run_reader(url, saved, life, latest, lease):
    """Apply whatever comes, and go on from what an earlier life saved, until the last step."""
    path = Path(saved)
    model = scenario.new_model(99)
    words = load(path, model)
    if words:
        scenario.tell("held", words["version"])
    have = model if words else None
    subscriber = Subscriber(url, have=have, latest=latest, idle_timeout=scenario.LIMIT, lease=lease, workers=1)
    for update in subscriber.sync():
        update.apply(model)
        scenario.tell(
            "detour" if update.detours else "whole" if update.whole else "onward",
            update.version,
            fingerprint(model),
            update.metadata["bits"],
        )
        save(path, model, version=update.version, life=life)
        if "last" in update.metadata:
            return


def run_pruner(url):
    """Remove what may go, once the word comes."""

    async def prune():
        async with open_transport(url) as transport:
            scenario.tell("ready")
            sys.stdin.readline()
            pruning = await Pruner(transport, _RETENTION).prune()
            scenario.tell("removed", len(pruning.removal.records))

    asyncio.run(prune())


scenario.PARTS |= {"soak-trainer": run_trainer, "soak-reader": run_reader, "soak-pruner": run_pruner}

if __name__ == "__main__":
    scenario.main()
