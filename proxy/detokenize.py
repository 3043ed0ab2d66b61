"""Text of a growing token list: what may be shown already. Pure but for the decoder that is handed in.

Held back: the bytes of an unfinished character, the beginning of a stop string, and everything from a marker on (a tool
call is not content). Invariant: what was shown is a prefix of the final text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
_BROKEN = "\ufffd"


class TextStream:
    """`take` gives the text that became certain; `finish` the rest of the final text."""

    def __init__(self, decode: Decode, stops: Sequence[str], marker: str | None) -> None:
        self._decode = decode
        self._holds = [*stops, *([marker] if marker else [])]
        self._settled = ""
        self._from = 0
        self._read = 0
        self._shown = 0

    def take(self, ids: Sequence[int]) -> str:
        """All output so far in, new certain text out."""
        known = self._decode(ids[self._from : self._read])
        text = self._decode(ids[self._from :])
        if len(text) > len(known) and not text.endswith(_BROKEN):
            self._settled += text[len(known) :]
            self._from, self._read = self._read, len(ids)
        return self._show(self._certain())

    def finish(self, final: str) -> str:
        """The rest; nothing if the final text went another way than what was shown."""
        if not final.startswith(self._settled[: self._shown]):
            return ""
        rest, self._shown = final[self._shown :], len(final)
        return rest

    def _certain(self) -> int:
        end = len(self._settled)
        for hold in self._holds:
            at = self._settled.find(hold)
            if at >= 0:
                end = min(end, at)
                continue
            for size in range(min(len(hold) - 1, len(self._settled)), 0, -1):
                if self._settled.endswith(hold[:size]):
                    end = min(end, len(self._settled) - size)
                    break
        return end

    def _show(self, end: int) -> str:
        if end <= self._shown:
            return ""
        new, self._shown = self._settled[self._shown : end], end
        return new
