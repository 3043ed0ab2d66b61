"""One agent call on its way to a segment: where it belongs, what it adds, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proxy.generation import Generation
from proxy.routing import Place
from schemas.events import EndFacts


@dataclass(slots=True, eq=False)
class Turn:
    """`context_ids`: what the request adds behind the place's prefix, as little-endian int32. `chain` and `messages`: the
    conversation behind this turn's answer (chat). `check`: rules 4 and 5 once more, when the record is written."""

    api: str
    generation: Generation
    place: Place
    context_ids: bytes
    digest: str
    sampling: str
    received_at: int
    check: Callable[[], object]
    turn_id: str | None = None
    request: str | None = None
    response: str | None = None
    chain: bytes = b""
    messages: int = 0
    mismatch_tokens: int = 0
    end: EndFacts | None = None
    first_token_at: int = 0
    done_at: int = 0
    log_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.generation.kept = self.place.prefix
