"""What a generation has so far: tokens, log-probs and versions over all its engine calls, growing in place.

A stream looks at it with every token, so nothing here is copied to be read. Invariants: `ids` and `logprobs` have one
length; `spans` partition it; `tops` has one entry per token where the engine gives alternatives, else none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from schemas.versions import VersionSpan


class Output:
    """`text`: the engines' own, of all calls: right only if one call wrote it all (`pieces`)."""

    __slots__ = ("ids", "logprobs", "pieces", "spans", "text", "tops")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[Any] = []
        self.spans: list[VersionSpan] = []
        self.text = ""
        self.pieces = 0

    def extend(self, ids: Sequence[int], logprobs: Iterable[float], label: str) -> None:
        """Tokens that weights of this label produced."""
        if not ids:
            return
        first = len(self.ids)
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        self._mark(label, first, len(self.ids))

    def label_from(self, first: int, spans: Iterable[VersionSpan]) -> None:
        """Better knowledge of the versions of all tokens from `first` on; the spans count from there."""
        while self.spans and self.spans[-1].start >= first:
            self.spans.pop()
        if self.spans and self.spans[-1].stop > first:
            last = self.spans.pop()
            self.spans.append(VersionSpan(last.version, last.start, first))
        for span in spans:
            self._mark(span.version, first + span.start, first + span.stop)

    def cut(self, length: int) -> None:
        """Forget what is behind the first `length` tokens."""
        del self.ids[length:]
        del self.logprobs[length:]
        del self.tops[length:]
        self.label_from(length, ())

    def _mark(self, label: str, start: int, stop: int) -> None:
        if self.spans and self.spans[-1].version == label:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(label, start, stop))
