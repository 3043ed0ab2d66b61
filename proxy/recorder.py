"""The record: what is written to the log, and when an answer may be given.

Design §5: the log has acknowledged, then the client gets its answer. Invariants: one record of a session is in flight at
a time, so their order in the log is the order of their indices; a record that was handed over is followed to its end
even if its client has gone; after an unknown outcome, or where another replica's claim came first (`ownership.py`), the
session is forgotten here, because only a new claim can tell what the log has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

import msgspec
import structlog

from journal.clock import Clock
from journal.payloads import PayloadStore
from journal.producer import Position
from proxy.experts import merge, pack_experts
from proxy.metrics import Metrics
from proxy.ownership import Holding, Ownership, SessionTaken
from proxy.sessions import Identity, Session, SessionTable
from proxy.turn import Turn
from schemas.arrow import EXPERTS_CODEC, REQUEST_CODEC, SEGMENT_COLUMNS, SEGMENT_COLUMNS_CODEC
from schemas.errors import CorruptPayload, PublishTimeout
from schemas.events import (
    EndFacts,
    Event,
    PayloadRef,
    RewardAssigned,
    SessionClaimed,
    TokenSegment,
    TrajectoryEnded,
    TrajectoryStarted,
    identified,
)
from schemas.settings import Settings
from schemas.tokens import pack_ids, pack_logprobs
from schemas.versions import distinct_real

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Publisher(Protocol):
    """The acknowledged produce of `journal.producer.AckProducer`."""

    async def apublish(self, event: Event) -> Position: ...


class Recorder:
    """Writes the events of sessions."""

    def __init__(
        self, producer: Publisher, ownership: Ownership, store: PayloadStore, table: SessionTable, settings: Settings,
        clock: Clock, metrics: Metrics, claimant: str,
    ) -> None:  # fmt: skip
        self._producer = producer
        self._ownership = ownership
        self._store = store
        self._table = table
        self._run_id = settings.run.run_id
        self._max_inline = settings.payload.max_inline_bytes
        self._clock = clock
        self._metrics = metrics
        self._claimant = claimant
        self._tasks: set[asyncio.Task[Any]] = set()

    async def claim(self, identity: Identity, holding: Holding, *, restart: bool) -> Position:
        """Own the session from here on. SessionTaken: a higher claim stood there already."""
        ids = self._ids(identity, holding.epoch)
        event = SessionClaimed(**ids, claimant=self._claimant, restart=restart)
        position = await self._to_its_end(self._append(identified(event), holding))
        await self._ownership.check(holding, position)
        return position

    async def begin(self, session: Session, attributes: str | None) -> None:
        """Facts of the start that no segment carries."""
        identity = session.identity
        ids = self._ids(identity, session.epoch)
        event = TrajectoryStarted(**ids, instance_id=identity.instance_id, attributes=attributes)
        await self._to_its_end(self._append(identified(event)))
        session.started = True

    async def segment(self, turn: Turn) -> TokenSegment:
        """Record a finished turn; returns when it is in the log, also if the caller is cancelled meanwhile."""
        return await self._to_its_end(self._segment(turn))

    async def end(self, session: Session, end: EndFacts) -> EndFacts:
        """Record the end (the first one counts) and close the session. The end that holds is returned."""
        return await self._to_its_end(self._end(session, end))

    async def reward(
        self, identity: Identity, epoch: int | None, reward: float, components: dict[str, float], source: str
    ) -> None:
        """Record a reward that came after the end. `epoch`: the claim that the caller knows of."""
        event = RewardAssigned(
            run_id=self._run_id, kind=identity.kind, occurred_at=self._clock(),
            parent_traj_id=identity.parent_traj_id, group_id=identity.group_id, attempt=identity.attempt,
            sample_index=identity.sample_index, session_id=identity.session_id, epoch=epoch,
            reward=reward, components=components, source=source,
        )  # fmt: skip
        await self._to_its_end(self._append(identified(event)))

    async def drain(self) -> None:
        """Wait for records that are in flight."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ids(self, identity: Identity, epoch: int) -> dict[str, Any]:
        return {
            "run_id": self._run_id,
            "kind": identity.kind,
            "occurred_at": self._clock(),
            "session_id": identity.session_id,
            "epoch": epoch,
            "parent_traj_id": identity.parent_traj_id,
            "group_id": identity.group_id,
            "attempt": identity.attempt,
            "sample_index": identity.sample_index,
        }

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._landed)
        return await asyncio.shield(task)

    def _landed(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also if its client has gone

    async def _append(self, event: Event, claim: Holding | None = None) -> Position:
        position = await self._producer.apublish(event)
        if claim is not None:
            self._ownership.claimed(claim, position)
        self._ownership.wrote(position)
        return position

    async def _segment(self, turn: Turn) -> TokenSegment:
        session = turn.generation.session
        session.recording += 1
        try:
            async with session.writing:
                segment = await self._write_segment(session, turn)
        finally:
            session.recording -= 1
        self._metrics.recorded(
            len(turn.generation.output_ids),
            turn.mismatch_tokens,
            unknown=bool(segment.spans) and not distinct_real(s.version for s in segment.spans),
            span_mismatches=turn.generation.span_mismatches,
        )
        return segment

    async def _write_segment(self, session: Session, turn: Turn) -> TokenSegment:
        _check_writable(session)
        turn.check()
        segment = self._build(turn)
        segment = await self._with_experts(segment, turn)
        await self._publish(session, await self._by_reference(segment))
        session.record(segment, turn.place, turn.chain, turn.messages)
        session.used_at = self._clock()
        if segment.end is not None:
            self._table.finish(session, segment.end)
        return segment

    async def _end(self, session: Session, end: EndFacts) -> EndFacts:
        async with session.writing:
            if session.end is not None:
                return session.end
            _check_writable(session)
            end = msgspec.structs.replace(end, segment_count=session.next_index)
            await self._publish(
                session, identified(TrajectoryEnded(**self._ids(session.identity, session.epoch), end=end))
            )
            self._table.finish(session, end)
        return end

    async def _publish(self, session: Session, event: Event) -> None:
        try:
            position = await self._append(event)
            await self._ownership.check(session.holding, position)
        except (PublishTimeout, SessionTaken):
            self._table.forget(session)
            raise

    def _build(self, turn: Turn) -> TokenSegment:
        generation, place = turn.generation, turn.place
        session, engine = generation.session, generation.engine
        appends = session.appends(place)
        end = turn.end
        if end is not None:
            end = msgspec.structs.replace(end, segment_count=session.next_index + 1)
        segment = TokenSegment(
            **self._ids(session.identity, session.epoch),
            segment_index=session.next_index,
            lineage_id=session.lineage_name(place),
            parent_segment_index=place.parent.segment_index if place.parent is not None else None,
            branch_point=None if appends or place.parent is None else place.prefix,
            lineage_reason=None if appends else place.reason or "branch",
            turn_id=turn.turn_id,
            api=turn.api,
            context_ids=turn.context_ids,
            output_ids=pack_ids(generation.output_ids),
            output_logprobs=pack_logprobs(generation.logprobs),
            spans=tuple(generation.spans),
            version_at_dispatch=generation.version_at_dispatch,
            engine_id=engine.engine_id if engine is not None else "",
            finish_reason=str(generation.finish.get("type", "")),
            request=turn.request,
            request_digest=turn.digest,
            sampling=turn.sampling,
            response=turn.response,
            prompt_tokens=len(generation.prompt),
            cached_tokens=generation.cached_tokens,
            preemptions=generation.preemptions,
            tito_mismatch_tokens=turn.mismatch_tokens,
            received_at=turn.received_at,
            first_token_at=turn.first_token_at or turn.done_at,
            done_at=turn.done_at,
            started=not session.started,
            end=end,
        )
        return identified(segment)

    async def _by_reference(self, segment: TokenSegment) -> TokenSegment:
        """Large columns and requests travel in the payload store."""
        columns = len(segment.context_ids) + len(segment.output_ids) + len(segment.output_logprobs)
        if columns > self._max_inline:
            ref = await self._put(segment, _columns(segment), SEGMENT_COLUMNS_CODEC)
            segment = msgspec.structs.replace(
                segment, context_ids=b"", output_ids=b"", output_logprobs=b"", tokens_ref=ref
            )
        if segment.request is not None and len(segment.request) > self._max_inline:
            ref = await self._put(segment, segment.request.encode(), REQUEST_CODEC)
            segment = msgspec.structs.replace(segment, request=None, request_ref=ref)
        return segment

    async def _with_experts(self, segment: TokenSegment, turn: Turn) -> TokenSegment:
        """Routed experts always travel in the payload store; what an engine garbled is not worth an answer."""
        try:
            rows = merge(turn.generation.expert_calls, turn.place.prefix)
        except CorruptPayload as garbled:
            self._metrics.counts["garbled_experts"] += 1
            log.warning("routed_experts_garbled", error=garbled, engine=segment.engine_id)
            return segment
        if rows is None:
            return segment
        ref = await self._put(segment, pack_experts(rows), EXPERTS_CODEC)
        return msgspec.structs.replace(segment, experts=ref)

    async def _put(self, segment: TokenSegment, data: bytes, codec: str) -> PayloadRef:
        group, attempt = segment.group_id or segment.session_id, segment.attempt or 0
        return await asyncio.to_thread(self._store.put, self._run_id, group, attempt, data, codec)


def _check_writable(session: Session) -> None:
    session.check_open()
    if session.stale_claim:
        raise SessionTaken(
            "the claim of the session is over; the next call claims it anew",
            session_id=session.identity.session_id,
        )


def _columns(segment: TokenSegment) -> bytes:
    import pyarrow as pa

    row = {name: [getattr(segment, name)] for name in SEGMENT_COLUMNS.names}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SEGMENT_COLUMNS) as writer:
        writer.write_table(pa.table(row, schema=SEGMENT_COLUMNS))
    return bytes(sink.getvalue())
