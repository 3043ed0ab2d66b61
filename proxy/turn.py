"""One agent call on its way to a segment: where it belongs, what it adds, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proxy.generation import Generation
from proxy.ownership import SessionTaken
from proxy.routing import Place
from proxy.sessions import Session
from schemas.events import EndFacts
from schemas.tokens import pack_ids


@dataclass(slots=True, eq=False)
class Turn:
    """`context_ids`: what the request adds behind the place's prefix, as little-endian int32. `chain` and `messages`: the
    conversation behind this turn's answer (chat). `check`: rules 4 and 5 once more, when the record is written. `find`: where
    its request goes in a session."""

    api: str
    generation: Generation
    place: Place
    context_ids: bytes
    digest: str
    sampling: str
    received_at: int
    check: Callable[[], object]
    find: Callable[[Session], Place]
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

    def move(self, session: Session) -> None:
        """To the same session as another replica left it. SessionTaken: there the request would have had another prompt."""
        place = self.find(session)
        if place.prefix > len(self.generation.prompt) or (
            self.chain
            and (place.parent is None, place.prefix) != (self.place.parent is None, self.place.prefix)
        ):
            raise SessionTaken(
                "another proxy went on with the conversation", session_id=session.identity.session_id
            )
        self.place = place
        self.context_ids = pack_ids(self.generation.prompt[place.prefix :])
        self.generation.session = session
