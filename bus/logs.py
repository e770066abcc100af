"""How a log is read to its end."""

from __future__ import annotations

from .errors import TransientTransportError
from .message import Message, decode_message
from .retry import Retry
from .transport import Transport

__all__ = ["read_log"]

_PAGE = 1024


async def read_log(transport: Transport, log: str, *, after: int = -1, retry: Retry) -> list[Message]:
    """Return the messages behind a position, to the log's current end; their positions have no holes.

    The first may stand further on than the next position: retention removed what was before it.

    Raises:
        MessageFormatError: If a record cannot be read, or belongs elsewhere.
        TransientTransportError: If the backend does not answer, or shows a log with a hole, until the limit is reached.
        TransportError: If the backend fails for good.
    """
    messages: list[Message] = []

    async def read_page() -> bool:
        at = messages[-1].position if messages else after
        page = await transport.read(log, at, _PAGE)
        if page and page[0].position > at + 1 and at >= 0:
            # Either retention removed what lies between, or the backend does not show it yet.
            first = await transport.read(log, -1, 1)
            if not first or first[0].position <= at + 1:
                raise TransientTransportError(
                    f"log {log!r} shows position {page[0].position} but not {at + 1}; the backend lags behind",
                    url=transport.url,
                )
            messages.clear()
        for place, record in enumerate(page, page[0].position if page else 0):
            if record.position != place:
                raise TransientTransportError(
                    f"log {log!r} shows position {record.position} but not {place}; the backend lags behind",
                    url=transport.url,
                )
        messages.extend(decode_message(r.data, topic=transport.url, writer=log, position=r.position) for r in page)
        return bool(page)

    while await retry.call(f"reading log {log!r} of {transport.url}", read_page):
        pass
    return messages
