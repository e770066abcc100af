"""Whether a store keeps its word not to overwrite: asked once before anything is written that matters.

A store that takes no notice of the condition answers as if all were well, and two writers would destroy what the other
wrote.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from deltabus.bus.errors import TransientTransportError

from .objects import UncertainError

__all__ = ["refuses_to_overwrite"]

_NAME = ".conditional-writes"
_TEXT = b"deltabus found out with this whether the store refuses to overwrite when it is told so.\n"


async def refuses_to_overwrite(create: Callable[[str, memoryview], Awaitable[bool]], *, url: str) -> bool:
    """Return whether of two attempts to create one thing the second is refused at the latest.

    Args:
        create: Stores bytes under a name if there is none of that name; returns whether it did.
        url: The topic's, for the error.

    Raises:
        TransientTransportError: If an answer was lost.
        TransportError: What `create` raises.
    """
    try:
        # The first attempt may create it; the second must not.
        return not (await create(_NAME, memoryview(_TEXT)) and await create(_NAME, memoryview(_TEXT)))
    except UncertainError as error:
        raise TransientTransportError(
            f"{url} lost the answer when asked whether it refuses to overwrite: {error}; do it again", url=url
        ) from error
