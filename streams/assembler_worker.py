"""The assembler without Faust: chunks of raw records in, payload files, `GroupCompleted`, `GroupFailed` and dead letters
out, and per partition the mark up to which everything that was caused is acknowledged.

Sink before source (design §5): a group's payload file is in the store before its event is sent, and the mark moves over
the group's records only when the event is acknowledged. What a record itself causes goes to the dead letters with its
bytes, acknowledged before the mark passes it. What the infrastructure causes ends the process: `on_failure`, once.
"""

from __future__ import annotations

import errno
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from journal.clock import Clock
from journal.payloads import PayloadStore
from journal.producer import AckProducer, Outcome
from journal.segment_columns import with_columns
from schemas import events as ev
from schemas import topics
from schemas.arrow import GROUP_PAYLOAD_CODEC
from schemas.codec import decode
from schemas.errors import CorruptPayload, HoofprintError, SchemaError, StoreError, TransportError
from schemas.letters import letter_of
from streams import assembly
from streams.assembly_closed import ClosedAttempts
from streams.group_payload import group_payload

_WRITERS = 16  # payload files that wait for the disk, or for a store that is elsewhere, together


class RawRecord(Protocol):
    """A record as aiokafka gives it."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class AssemblerWorker:
    """All partitions of one process. Everything but the acknowledgements happens in one thread."""

    def __init__(
        self,
        rules: assembly.AssemblyRules,
        closed: ClosedAttempts,
        store: PayloadStore,
        producer: AckProducer,
        clock: Clock,
        on_failure: Callable[[HoofprintError], None],
    ) -> None:
        self._rules, self._closed, self._store = rules, closed, store
        self._producer, self._clock, self._on_failure = producer, clock, on_failure
        self._partitions: dict[int, assembly.Assembly] = {}
        self._acknowledged: deque[tuple[assembly.Assembly, Hashable]] = deque()
        self._held: dict[int, dict[Hashable, int]] = {}  # unconfirmed of partitions that will be read again
        self._frozen = False
        self._writers = ThreadPoolExecutor(_WRITERS, "payloads") if store.waits else None
        self.counts: Counter[str] = Counter()

    def handle(self, partition: int, records: Sequence[RawRecord]) -> None:
        """Records of a partition in offset order. StoreError: the payload store does not take a group."""
        state = self._partitions.get(partition)
        if state is None:
            held = self._held.pop(partition, {})
            state = assembly.Assembly(self._rules, self._closed, unconfirmed=held, counts=self.counts)
            self._partitions[partition] = state
        due: list[assembly.Completed | assembly.Failed] = []
        for record in records:
            if state.next_offset is not None and record.offset < state.next_offset:
                continue
            try:
                event = self._with_columns(decode(record.value or b""))
            except SchemaError as wrong:
                assembly.skip(state, record.offset)
                self._bury(state, partition, record, f"{wrong.code}: {wrong.message}")
                continue
            for effect in assembly.apply(state, record.offset, event):
                if isinstance(effect, assembly.Rejected):
                    self._bury(state, partition, record, effect.reason)
                else:
                    due.append(effect)
        self._emit(state, due)

    def tick(self, read_to_end: Callable[[int, int], bool]) -> None:
        """Time-outs and attempts closed elsewhere. `read_to_end(partition, next_offset)`: nothing is left to read.

        While records are left, only what they say is late is late: after a pause the log itself shows what had come. One
        record from the future, of a writer whose clock is wrong, does not make it later than it is.
        """
        now = self._clock()
        for partition, state in self._partitions.items():
            assembly.drop_closed(state)
            current = state.next_offset is not None and read_to_end(partition, state.next_offset)
            late = assembly.tick(state, now if current else min(state.newest_at, now))
            self._emit(state, [effect for effect in late if isinstance(effect, assembly.Failed)])

    def forget(self) -> None:
        """The partitions are read again from their marks, or belong to another worker.

        What is in flight goes on holding the mark.
        """
        self._held.update({partition: state.unconfirmed for partition, state in self._partitions.items()})
        self._partitions.clear()

    def freeze(self) -> None:
        """Commit nothing any more: a record was not handled to its end."""
        self._frozen = True

    def low_water(self, partition: int) -> int | None:
        """The offset to commit for a partition; None: nothing new."""
        self._settle()
        state = self._partitions.get(partition)
        return None if state is None or self._frozen else assembly.low_water(state)

    def next_offset(self, partition: int) -> int | None:
        """The next record to handle, None while none of this partition was."""
        state = self._partitions.get(partition)
        return state.next_offset if state else None

    @property
    def open_groups(self) -> int:
        """Attempts on their way."""
        return sum(len(state.groups) for state in self._partitions.values())

    def _emit(
        self, state: assembly.Assembly, effects: Sequence[assembly.Completed | assembly.Failed]
    ) -> None:
        """What a chunk caused, in its order: first all payload files, then the events."""
        done = [effect for effect in effects if isinstance(effect, assembly.Completed)]
        refs = iter(self._writers.map(self._put, done) if self._writers is not None else map(self._put, done))
        for effect in effects:
            if isinstance(effect, assembly.Failed):
                self.counts["groups_failed"] += 1
                self._send(state, effect.attempt, effect.event)
            else:
                self.counts["groups_completed"] += 1
                self._send(state, effect.attempt, assembly.completion(effect, next(refs)))

    def _put(self, done: assembly.Completed) -> ev.PayloadRef:
        return self._store.put(
            done.run_id,
            done.attempt.group_id,
            done.attempt.attempt,
            group_payload(done.sequences),
            GROUP_PAYLOAD_CODEC,
        )

    def _bury(self, state: assembly.Assembly, partition: int, record: RawRecord, reason: str) -> None:
        self.counts["dead_letters"] += 1
        token = ("dead_letter", record.offset)
        assembly.hold(state, token, record.offset)
        letter = letter_of(
            self._rules.run_id, topics.SEGMENTS.name, partition, record.offset, record.timestamp, reason,
            record.key, record.value, record.headers,
        )  # fmt: skip
        self._send(state, token, letter)

    def _send(self, state: assembly.Assembly, token: Hashable, event: ev.Event) -> None:
        """The token is held already; its acknowledgement arrives in the producer's thread."""

        def acknowledged(outcome: Outcome) -> None:
            if isinstance(outcome, TransportError):
                self._on_failure(outcome)
            else:
                self._acknowledged.append((state, token))

        self._producer.post(event, acknowledged)

    def _settle(self) -> None:
        """Acknowledgements, from the producer's thread into the state."""
        while self._acknowledged:
            state, token = self._acknowledged.popleft()
            assembly.confirm(state, token)

    def _with_columns(self, event: ev.Event) -> ev.Event:
        """A large segment's columns come from the store; SchemaError if they are not what was recorded.

        Those of a closed attempt are not needed, and perhaps deleted: its records are read again after a restart.
        """
        if (
            not isinstance(event, ev.TokenSegment)
            or event.tokens_ref is None
            or event.run_id != self._rules.run_id
            or event.kind != "train"
            or assembly.is_closed(self._closed, event)
        ):
            return event
        try:
            return with_columns(event, self._store.open_arrow)
        except StoreError as problem:
            if problem.detail.get("errno") != errno.ENOENT:
                raise
            raise CorruptPayload(
                f"payload {event.tokens_ref.uri} is gone", uri=event.tokens_ref.uri
            ) from problem
