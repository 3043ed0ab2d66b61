"""A stop string that begins in the output of an earlier call and ends in that of this one.

The engine sees only its own call's text, so it cannot find such a string. It can only end within the first characters of the
new text, so somebody looks at these and no further. Pure but for the decoder that is handed in. Invariant: the generation
ends with the token with which its text first has a stop string, as it would have in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Decode = Callable[[Sequence[int]], str]

_SPARE = 16
"""Tokens before the newest that may be part of no character of a stop string: special ones, say."""


class Found(NamedTuple):
    """The string, and the output tokens up to its end."""

    stop: str
    tokens: int


class StopWatch:
    """`earlier`: output tokens of the calls before this one. `over`: a string that began in them can end no more."""

    def __init__(self, decode: Decode, stops: Sequence[str], earlier: Sequence[int]) -> None:
        self.over = not stops or not earlier
        self._decode = decode
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        # a character has up to four bytes, and a token may be a single one
        self._first = max(0, len(earlier) - 4 * self._longest - _SPARE)
        self._looked = len(earlier)
        self._known = len(decode(earlier[self._first :])) if not self.over else 0

    def look(self, output: Sequence[int]) -> Found | None:
        """All output so far in; what was found. To be called until `over`."""
        while not self.over and self._looked < len(output):
            self._looked += 1
            text = self._decode(output[self._first : self._looked])
            for stop in self._stops:
                if stop in text:
                    self.over = True
                    return Found(stop, self._looked)
            # one more, because a broken character at the seam counts before it is whole
            self.over = len(text) > self._known + self._longest
        return None
