"""How fast an engine makes the tokens of one reply, as seen from here, and how many of them fill a given time.

An engine that tells every token wakes two processes for each, while a client gets a frame every few tokens: asked for events as
far apart as frames, it tells the same in a fraction of the work. Invariant: as long as nothing is known, every token is told.
"""

from __future__ import annotations

from typing import Final

_LEAST_TOKENS: Final = 8
"""A shorter reply says more about its dispatch than about the engine's speed."""
_WEIGHT: Final = 0.25


class TokenPace:
    """A moving mean over replies; `seconds` per token, 0 as long as none was long enough."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A reply got so many tokens in the time behind its first."""
        if tokens < _LEAST_TOKENS or seconds <= 0:
            return
        found = seconds / tokens
        self.seconds += (found - self.seconds) * (_WEIGHT if self.seconds else 1.0)

    def tokens_in(self, seconds: float, most: int) -> int:
        """Whole tokens that come in this time, from 1 to `most`."""
        if not self.seconds or seconds <= 0:
            return 1
        return max(1, min(most, int(seconds / self.seconds + 0.5)))
