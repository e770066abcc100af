"""deltabus: model weights from a trainer to inference engines as tiny, lossless, versioned deltas.

`Publisher` stands in training code, `Subscriber` in inference code; a URL says where the bytes travel. Names are
imported when they are first used, so that `import deltabus` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import version as _version

    from deltabus.bus.errors import DeltabusError
    from deltabus.bus.group import Group
    from deltabus.codecs.slices import TensorSlice

    from .direct import DirectSubscriber
    from .publication import Publication, Published
    from .publisher import Publisher
    from .subscriber import Subscriber
    from .update import Update

    __version__ = _version("deltabus")

__all__ = [
    "DeltabusError",
    "DirectSubscriber",
    "Group",
    "Publication",
    "Published",
    "Publisher",
    "Subscriber",
    "TensorSlice",
    "Update",
    "__version__",
]

_HOME = {
    "DeltabusError": "deltabus.bus.errors",
    "DirectSubscriber": ".direct",
    "Group": "deltabus.bus.group",
    "Publication": ".publication",
    "Published": ".publication",
    "Publisher": ".publisher",
    "Subscriber": ".subscriber",
    "TensorSlice": "deltabus.codecs.slices",
    "Update": ".update",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("deltabus")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
