"""A session that this process does not know: claim it, read the log up to the claim, go on token-exactly.

Design §5. Where to read from stands in the signed token; a header session is looked for in its partition as far back as
`proxy.session_max_age_s`. Many sessions come back at once after a restart, so calls that arrive together share one
reading. A claimant that finds its epoch taken claims a higher one.

The archiver deletes records of old and of decided sessions. A session whose beginning is gone is refused, TrajectoryGone: it is
never taken up from the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
import structlog

from journal.clock import Clock
from journal.event_log import read_events
from journal.payloads import PayloadStore
from journal.producer import Position
from journal.reader import TopicReader, offsets_at_time
from journal.segment_columns import with_columns
from proxy.log_fold import SessionLog, read_log, restore
from proxy.ownership import Holding, Ownership, SessionTaken
from proxy.recorder import Recorder
from proxy.sessions import Identity, Session
from proxy.tokens_auth import SessionToken, TokenSigner
from schemas.errors import SchemaError, TrajectoryGone
from schemas.events import Event, SessionEvent, TokenSegment
from schemas.settings import Settings
from schemas.topics import SEGMENTS

log = structlog.get_logger(__name__)

_GATHER_S = 0.02
CLAIMS = 5
"""So often a claim is made before the call is told to come again."""


@dataclass(eq=False)
class _Wanted:
    identity: Identity
    start: int
    claim: Position
    found: asyncio.Future[list[Event]]
    events: list[Event] = field(default_factory=list)
    first_left: int = 0
    """The first record that its partition still had when everything was read."""

    def give(self) -> None:
        """What was found, to whoever waits for it."""
        if self.start >= self.first_left or self.start < 0:
            self.found.set_result(self.events)
        else:
            self.found.set_exception(_gone(self.identity, start=self.start, first_left=self.first_left))


class Recovery:
    """Rebuilds sessions from the log."""

    def __init__(
        self, settings: Settings, recorder: Recorder, ownership: Ownership, store: PayloadStore,
        signer: TokenSigner, clock: Clock,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._recorder = recorder
        self._ownership = ownership
        self._store = store
        self._signer = signer
        self._clock = clock
        self._queue: list[_Wanted] = []
        self._reading: asyncio.Task[None] | None = None

    async def recover(self, identity: Identity, token: SessionToken | None) -> Session:
        """The session under a new claim, with all that the log has of it."""
        known = token.epoch if token is not None else 0
        for _ in range(CLAIMS):
            holding = self._ownership.hold(identity.session_id, known)
            try:
                position = await self._recorder.claim(identity, holding, restart=False)
            except SessionTaken:
                continue  # the next claim lies above the one that was seen
            start = token.offset if token is not None else -1
            history = read_log(await self._events(identity, start, position))
            if history.epoch < holding.epoch:
                return await self._rebuild(identity, holding, position, token, history)
            known = history.epoch
        raise SessionTaken("another proxy keeps claiming the session", session_id=identity.session_id)

    async def _rebuild(
        self,
        identity: Identity,
        holding: Holding,
        position: Position,
        token: SessionToken | None,
        history: SessionLog,
    ) -> Session:
        if any(index not in history.segments for index in range(len(history.segments))):
            raise _gone(identity, segments=sorted(history.segments))
        for index, segment in history.segments.items():
            if segment.tokens_ref is not None or segment.request_ref is not None:
                history.segments[index] = await asyncio.to_thread(_inline, segment, self._store)
        place = (
            Position(token.partition, token.offset) if token is not None else Position(position.partition, -1)
        )
        text = self._signer.issue(token_of(identity, place, holding.epoch))
        session = Session(identity, holding, text, self._clock())
        restore(session, history)
        log.info(
            "session_recovered",
            session_id=identity.session_id,
            segments=session.next_index,
            ended=session.end is not None,
        )
        return session

    async def _events(self, identity: Identity, start: int, claim: Position) -> list[Event]:
        wanted = _Wanted(identity, start, claim, asyncio.get_running_loop().create_future())
        self._queue.append(wanted)
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._read_together())
        return await wanted.found

    async def _read_together(self) -> None:
        while self._queue:
            await asyncio.sleep(_GATHER_S)
            batch, self._queue = self._queue, []
            reading = asyncio.ensure_future(asyncio.to_thread(self._read, batch))
            await asyncio.wait((reading,))
            failure = reading.exception()  # it belongs to those who wait, whatever it is
            if failure is not None:
                _resolve(batch, partial(_fail, failure))
            else:
                _resolve(batch, _Wanted.give)

    def _read(self, batch: list[_Wanted]) -> None:
        partitions = sorted({wanted.claim.partition for wanted in batch})
        starts = {p: [w.start for w in batch if w.claim.partition == p] for p in partitions}
        old = [p for p in partitions if min(starts[p]) < 0]
        since_ms = self._clock() // 1000 - int(self._settings.proxy.session_max_age_s * 1000)
        by_age = offsets_at_time(self._settings.kafka, SEGMENTS, since_ms, old) if old else {}
        start = {(SEGMENTS.name, p): by_age.get(p, min(starts[p])) for p in partitions}
        by_name = {wanted.identity.session_id: wanted for wanted in batch}
        keys = {(w.identity.group_id or w.identity.session_id).encode() for w in batch}
        reader = TopicReader(self._settings.kafka, [SEGMENTS], start, {SEGMENTS.name: partitions})
        try:
            records = (
                record for record in reader.read_to_end() if record.key in keys
            )  # others need no decoding
            for record, event in read_events(records, _skip):
                found = by_name.get(event.session_id) if isinstance(event, SessionEvent) else None
                if found is not None and record.offset < found.claim.offset:
                    found.events.append(event)
            left = reader.first_offsets()  # asked last: deleted while it was read is deleted, too
            for wanted in batch:
                wanted.first_left = left[SEGMENTS.name, wanted.claim.partition]
        finally:
            reader.close()


def _skip(_record: object, wrong: SchemaError) -> None:
    log.warning("undecodable_record", error=wrong)


def _gone(identity: Identity, **detail: object) -> TrajectoryGone:
    return TrajectoryGone(
        "the beginning of the session is no longer in the log", session_id=identity.session_id, **detail
    )


def _resolve(batch: list[_Wanted], give: Callable[[_Wanted], None]) -> None:
    for wanted in batch:
        if not wanted.found.done():
            give(wanted)


def _fail(failure: BaseException, wanted: _Wanted) -> None:
    wanted.found.set_exception(failure)


def _inline(segment: TokenSegment, store: PayloadStore) -> TokenSegment:
    segment = with_columns(segment, store.open_arrow)
    if segment.request_ref is not None:
        segment = msgspec.structs.replace(segment, request=store.get(segment.request_ref).decode())
    return segment


def token_of(identity: Identity, place: Position, epoch: int) -> SessionToken:
    """The session's token; `place`: its first claim."""
    return SessionToken(
        identity.session_id, identity.parent_traj_id, identity.kind, identity.group_id, identity.attempt,
        identity.sample_index, identity.instance_id, place.partition, place.offset, epoch,
    )  # fmt: skip
