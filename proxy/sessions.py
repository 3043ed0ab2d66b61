"""Sessions in memory: who they are, what they recorded, and in which state they are.

Invariants: a session's segments have the indices 0, 1, 2, … in time over all lineages; its token store is exactly what
the log has; at most one record of a session is being published (`writing`); an ended session keeps only its end.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from proxy.ownership import Holding
from proxy.routing import Lineage, Links, Place, Step
from schemas.errors import (
    HoofprintError,
    StalenessExceeded,
    TrajectoryClosed,
    TrajectoryGone,
    TrajectoryVersionChanged,
)
from schemas.events import EndFacts, Kind, TokenSegment
from schemas.ids import lineage_id
from schemas.versions import distinct_real

if TYPE_CHECKING:
    from proxy.generation import Generation
    from proxy.tokens_auth import SessionToken

EXPIRED, CLOSED_ATTEMPT, DISCARDED = "expired", "attempt_closed", "discarded"
_REFUSALS = {error.code: error for error in (StalenessExceeded, TrajectoryVersionChanged)}
_KEPT_ENDS = 20_000


def _nobody(_session_id: str) -> None:
    pass


class Identity(msgspec.Struct, frozen=True):
    """The ids that every event of the session carries."""

    session_id: str
    parent_traj_id: str
    kind: Kind
    group_id: str | None = None
    attempt: int | None = None
    sample_index: int | None = None
    instance_id: str | None = None


class Session:
    """One open trajectory at this proxy."""

    def __init__(self, identity: Identity, holding: Holding, token: str, now: int) -> None:
        self.identity = identity
        self.holding = holding
        self.born = 0
        """Epoch of the restart that this try of the trajectory began with: older tokens belong to a try that is void."""
        self.token = token
        self.shown: tuple[str, SessionToken] | None = None
        """The last token that was shown for it, and what it says: it is shown with every call, and checked once."""
        self.used_at = now
        self.next_index = 0
        self.started = False
        self.lineages: list[Lineage] = []
        self.by_chain: dict[bytes, Step] = {}
        self.links: Links = {}
        self.known_tools: set[bytes] = set()
        self.named_fields: set[str] = set()
        self.versions: list[str] = []
        self.engine: str | None = None
        self.end: EndFacts | None = None
        self.recording = 0
        """Turns whose record is on its way to the log."""
        self.writing = asyncio.Lock()
        self.inflight: dict[Generation, asyncio.Task[Any] | None] = {}

    @property
    def epoch(self) -> int:
        """Of its claim."""
        return self.holding.epoch

    @property
    def stale_claim(self) -> bool:
        """Another replica has claimed it, or a produce had an unknown outcome: only a new claim can tell what the log has."""
        return not self.holding.usable

    @property
    def busy(self) -> int:
        """Requests that generate or record."""
        return len(self.inflight) + self.recording

    def check_open(self) -> None:
        """Raise what a call to an ended session gets."""
        if self.end is not None:
            raise end_error(self.identity, self.end)

    def tokens_of(self, place: Place) -> bytes:
        """The token prefix at a place."""
        if place.parent is None:
            return b""
        return bytes(self.lineages[place.parent.lineage].tokens[: place.prefix * 4])

    def step(self, index: int | None) -> Step | None:
        """The step that a recorded segment made."""
        for lineage in self.lineages:
            for step in lineage.steps:
                if step.segment_index == index:
                    return step
        return None

    def appends(self, place: Place) -> bool:
        """Whether the place is still the newest step of its lineage."""
        return place.parent is not None and self.lineages[place.parent.lineage].steps[-1] is place.parent

    def lineage_name(self, place: Place) -> str:
        """Id of the lineage that a segment at this place, recorded now, belongs to."""
        if place.parent is not None and self.appends(place):
            return self.lineages[place.parent.lineage].lineage_id
        return lineage_id(self.identity.parent_traj_id, self.next_index)

    def record(self, segment: TokenSegment, place: Place, chain: bytes, messages: int) -> Step:
        """Take over a segment that is in the log; `chain`, `messages`: the conversation behind it (chat), or empty."""
        if self.appends(place):
            assert place.parent is not None
            number = place.parent.lineage
        else:
            number = len(self.lineages)
            self.lineages.append(Lineage(segment.lineage_id, bytearray(self.tokens_of(place)), []))
        lineage = self.lineages[number]
        lineage.tokens += segment.context_ids
        lineage.tokens += segment.output_ids
        end, output = len(lineage.tokens) // 4, len(segment.output_ids) // 4
        step = Step(segment.segment_index, number, end, chain, messages, output)
        lineage.steps.append(step)
        if chain:
            self.by_chain[chain] = step
        self.next_index = segment.segment_index + 1
        self.started = True
        self.versions = distinct_real([*self.versions, *(span.version for span in segment.spans)])
        return step


def end_error(identity: Identity, end: EndFacts) -> HoofprintError:
    """Design §5: finalized 409, refused the same 502, expired or closed attempt 410."""
    ids = {"session_id": identity.session_id, "parent_traj_id": identity.parent_traj_id}
    if end.reason in _REFUSALS:
        facts: dict[str, Any] = msgspec.json.decode(end.detail) if end.detail else {}
        message = facts.pop("message", end.reason)
        return _REFUSALS[end.reason](message, **{**facts, **ids})
    if end.reason in (EXPIRED, CLOSED_ATTEMPT, DISCARDED):
        return TrajectoryGone(f"the session is over: {end.reason}", reason=end.reason, **ids)
    return TrajectoryClosed("the trajectory was finalized", reason=end.reason, **ids)


class Ended(msgspec.Struct, frozen=True):
    """What is left of an ended session."""

    identity: Identity
    end: EndFacts
    epoch: int


class SessionTable:
    """Open sessions by id, and the last ends. `on_end`: told of every session whose try is over, or that is another's now."""

    def __init__(self, on_end: Callable[[str], None] = _nobody) -> None:
        self.open: dict[str, Session] = {}
        self.ended: OrderedDict[str, Ended] = OrderedDict()
        self.on_end = on_end

    def add(self, session: Session) -> None:
        """A new session, or a new try of an old one."""
        self.ended.pop(session.identity.session_id, None)
        self.open[session.identity.session_id] = session

    def finish(self, session: Session, end: EndFacts) -> None:
        """The session has ended; only its end is kept."""
        session.end = end
        name = session.identity.session_id
        if self.open.get(name) is session:
            del self.open[name]
            self.on_end(name)
            self.ended[name] = Ended(session.identity, end, session.epoch)
            if len(self.ended) > _KEPT_ENDS:
                self.ended.popitem(last=False)

    def forget(self, session: Session, *, lost: bool = False) -> None:
        """This object is not the truth any more: the next call claims the session anew and reads the log. `lost`: another
        replica has claimed it, as is known of one whose claim is over."""
        name = session.identity.session_id
        session.holding.usable = False
        if self.open.get(name) is session:
            del self.open[name]
            if lost or session.holding.over_at is not None:
                self.on_end(name)

    def of_attempt(self, group_id: str, attempt: int) -> list[Session]:
        """Open sessions of a group attempt."""
        return [
            s for s in self.open.values() if s.identity.group_id == group_id and s.identity.attempt == attempt
        ]

    def idle_since(self, before: int) -> list[Session]:
        """Sessions with nothing in flight that were last used before this time."""
        return [s for s in self.open.values() if s.used_at < before and not s.busy]
