"""The offset that may be committed: everything before it is finished. Groups finish in any order; commits do not."""

from __future__ import annotations


class LowWater:
    """Of one partition. A record that was never finished holds the mark, so a restarted worker reads it again."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._next = 0
        self._committed = -1

    def begin(self, offset: int) -> None:
        """A record was read."""
        self._open.add(offset)
        self._next = max(self._next, offset + 1)

    def finish(self, offset: int) -> None:
        """Nothing more will be done for the record; unknown offsets are ignored."""
        self._open.discard(offset)

    @property
    def mark(self) -> int:
        """Next offset that a restarted worker has to read."""
        return min(self._open, default=self._next)

    def advance(self) -> int | None:
        """The mark if it moved since the last call, else None."""
        if self.mark == self._committed or (self._committed < 0 and self._next == 0):
            return None
        self._committed = self.mark
        return self.mark
