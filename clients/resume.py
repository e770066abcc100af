"""How a trainer that resumes from an older checkpoint takes its followers back with it.

The log goes on: its next version is the older state again, by a delta that undoes those after it. Whoever holds that
state still holds the new version, by its digest, and downloads nothing.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from deltabus.bus.core import LogWriter, TopicReader
from deltabus.bus.errors import DeltabusError, RetentionGapError, TransportError
from deltabus.bus.message import Kind, Message
from deltabus.bus.planner import plan
from deltabus.bus.transport import Transport
from deltabus.codecs.changes import Changes, reverse
from deltabus.codecs.shadow import Shadow

from .fetching import in_thread
from .outbox import Draft
from .staged import Staged
from .stager import Stager

__all__ = ["Resumed", "resume"]

_log = logging.getLogger("deltabus.publisher")


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a log goes on from what its writer holds.

    Attributes:
        draft: What leads from the newest state of the log to the one that is held; None when that is the newest.
    """

    draft: Draft | None


async def resume(
    transport: Transport, log: LogWriter, pool: ThreadPoolExecutor, shadow: Shadow, *, newest: Message
) -> Resumed | None:
    """Return where a log goes on from a state; None when only an anchor will do.

    Args:
        transport: The topic, opened.
        log: The log's end, opened.
        pool: Where decoding runs in parallel.
        shadow: Holds the state; it holds the same afterwards.
        newest: The message that leads to the newest state of the log.

    Raises:
        TransportError: If what led on from an older state cannot be fetched.
    """
    digest = await in_thread(shadow.digest, pool)
    if digest == newest.digest_after:
        return Resumed(None)
    schema = shadow.schema.checksum
    same = [m for m in log.history if m.digest_after == digest and m.schema.checksum == schema]
    older = max(same, key=lambda message: message.version, default=None)
    changes = None if older is None else await _way_back(transport, log, pool, shadow, older=older, newest=newest)
    if older is None or changes is None:
        _log.info("%s: the model is not version %d; an anchor will be published", transport.url, newest.version)
        return None
    _log.warning(
        "%s: the model is version %d (step %d), and the topic at version %d (step %d): it goes back there",
        transport.url,
        older.version,
        older.step,
        newest.version,
        newest.step,
    )
    return Resumed(Draft(older.step, changes, metadata=older.metadata))


async def _way_back(
    transport: Transport, log: LogWriter, pool: ThreadPoolExecutor, shadow: Shadow, *, older: Message, newest: Message
) -> Changes | None:
    """Return the changes from the newest state of a log back to an older one; None where an anchor is cheaper."""
    anchor = min((message.nbytes for message in log.history if message.kind is Kind.ANCHOR), default=0)
    try:
        path = plan(log.history, have=older.state, target=newest.state)
    except RetentionGapError:
        return None
    if path.nbytes >= anchor or path.messages[0].kind is Kind.ANCHOR:
        return None
    stager = Stager(TopicReader(transport, keys=log.keys), pool)
    stager.hold(shadow, digest=older.digest_after, version=older.version)
    onward: Staged | None = None
    back: Changes | None = None
    try:
        for message in path.messages:
            staged = await stager.stage(message)
            onward = staged if onward is None else await in_thread(onward.followed_by, staged)
    except TransportError:
        raise
    except DeltabusError as error:
        _log.warning("%s: %s An anchor is published instead of the way back.", transport.url, error)
    else:
        back = reverse(onward.changes) if onward is not None and onward.changes is not None else None
    if onward is not None and onward.changes is not None:
        await in_thread(shadow.advance, reverse(onward.changes))
    return back
