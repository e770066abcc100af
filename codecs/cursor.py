"""Reading untrusted bytes front to back, never past their end."""

from __future__ import annotations

from deltabus.bus.errors import CorruptPayloadError

__all__ = ["Cursor"]


class Cursor:
    """A place in bytes that came from outside.

    >>> cursor = Cursor(bytes([7, 1, 0, 0, 0]), "segment 3")
    >>> cursor.u8(), cursor.u32()
    (7, 1)
    >>> cursor.finish()
    """

    __slots__ = ("_at", "_data", "_place")

    def __init__(self, data: bytes | memoryview, place: str) -> None:
        """Start at the first byte; `place` says in errors what the bytes are."""
        self._data = memoryview(data)
        self._at = 0
        self._place = place

    def corrupt(self, what: str) -> CorruptPayloadError:
        """Return the error that says what is wrong here."""
        return CorruptPayloadError(f"{self._place} {what}; fetch the payload again, or publish an anchor")

    def take(self, size: int) -> memoryview:
        """Return the next `size` bytes.

        Raises:
            CorruptPayloadError: If fewer are left.
        """
        left = len(self._data) - self._at
        if size > left:
            raise self.corrupt(f"is truncated: {size} bytes are needed at byte {self._at}, {left} are left")
        self._at += size
        return self._data[self._at - size : self._at]

    def u8(self) -> int:
        """Return the next byte.

        Raises:
            CorruptPayloadError: If none is left.
        """
        return self.take(1)[0]

    def u32(self) -> int:
        """Return the next four bytes as a number, little endian.

        Raises:
            CorruptPayloadError: If fewer are left.
        """
        return int.from_bytes(self.take(4), "little")

    def rest(self) -> memoryview:
        """Return all bytes that are left, perhaps none."""
        return self.take(len(self._data) - self._at)

    def finish(self) -> None:
        """Make sure that every byte was read.

        Raises:
            CorruptPayloadError: If some are left.
        """
        left = len(self._data) - self._at
        if left:
            raise self.corrupt(f"has {left} bytes too many")
