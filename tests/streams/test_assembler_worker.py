"""The worker between raw records and acknowledgements: sink before source, dead letters, what ends the process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import msgspec
import pyarrow as pa
import pytest
from assembler_runs import SECOND, flat
from assembler_sessions import Session, group
from fsspec.implementations.memory import MemoryFileSystem

from journal.payloads import PayloadStore
from journal.producer import OnOutcome, Position
from schemas import events as ev
from schemas.arrow import SEGMENT_COLUMNS, SEGMENT_COLUMNS_CODEC
from schemas.codec import encode
from schemas.errors import HoofprintError, PublishTimeout, StoreError
from streams.assembler_worker import AssemblerWorker
from streams.assembly import AssemblyRules
from streams.assembly_closed import ClosedAttempts


class Raw(NamedTuple):
    """A record as the consumer gives it."""

    offset: int
    value: bytes | None
    timestamp: int = 7
    key: bytes | None = b"key"
    headers: tuple[tuple[str, bytes], ...] = ()


class Outbox:
    """Stands where the producer stands: a record is acknowledged when the test says so."""

    def __init__(self) -> None:
        self.sent: list[tuple[ev.Event, OnOutcome]] = []

    def post(self, event: ev.Event, on_outcome: OnOutcome) -> None:
        self.sent.append((event, on_outcome))

    @property
    def events(self) -> list[ev.Event]:
        return [event for event, _ in self.sent]


class Bench:
    """A worker with an outbox and a store in a directory."""

    def __init__(self, root: Path, size: int = 1, *, fsync: bool = False) -> None:
        self.outbox, self.failures, self.now = Outbox(), list[HoofprintError](), 0
        self.store = PayloadStore(str(root), fsync)
        self.rules = AssemblyRules("run", size, 10 * SECOND, 0)
        self.worker = self.made(self.store)

    def made(self, store: PayloadStore) -> AssemblerWorker:
        return AssemblerWorker(
            self.rules, ClosedAttempts("run"), store, self.outbox, lambda: self.now, self.failures.append  # type: ignore[arg-type]
        )  # fmt: skip

    def take(self, values: Iterable[ev.Event | bytes], start: int = 0) -> None:
        records = [
            Raw(offset, value if isinstance(value, bytes) else encode(value))
            for offset, value in enumerate(values, start)
        ]
        self.worker.handle(0, records)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_mark_passes_a_group_only_when_its_event_is_acknowledged(bench: Bench) -> None:
    bench.take(flat(group(size=1)))
    ((event, acknowledge),) = bench.outbox.sent
    assert isinstance(event, ev.GroupCompleted)
    assert bench.worker.low_water(0) == 0
    acknowledge(Position(0, 0))
    assert bench.worker.low_water(0) == 5


def test_the_payload_is_in_the_store_before_its_event_is_sent(bench: Bench) -> None:
    bench.take(flat(group(size=1)))
    (event,) = bench.outbox.events
    assert isinstance(event, ev.GroupCompleted)
    assert bench.store.open_arrow(event.payload).num_rows == event.sequences


def test_files_that_wait_for_the_disk_together_give_the_same_events_in_the_same_order(tmp_path: Path) -> None:
    one, together = Bench(tmp_path / "one"), Bench(tmp_path / "together", fsync=True)
    events = flat(session for number in range(40) for session in group(f"g{number}", 1))
    for bench in (one, together):
        bench.take(events)
    assert together.outbox.events == one.outbox.events
    assert len(together.outbox.events) == 40
    for event in together.outbox.events:
        assert isinstance(event, ev.GroupCompleted)
        assert together.store.open_arrow(event.payload).num_rows == 1


class FarAway(MemoryFileSystem):  # type: ignore[misc]
    """A store that answers when four files are on their way to it."""

    protocol = "faraway"
    arrive = threading.Barrier(4)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self.arrive.wait(timeout=20)
        super().pipe_file(path, value, **options)


def test_files_wait_together_for_a_store_that_is_elsewhere(tmp_path: Path) -> None:
    fsspec.register_implementation("faraway", FarAway, clobber=True)
    bench = Bench(tmp_path)
    bench.worker = bench.made(PayloadStore("faraway://payloads"))
    bench.take(flat(session for number in range(8) for session in group(f"g{number}", 1)))
    assert len(bench.outbox.events) == 8


def test_one_file_of_many_that_cannot_be_written_sends_nothing_behind_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, fsync=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "g3").write_bytes(b"")  # where its directory would be
    with pytest.raises(StoreError):
        bench.take(flat(session for number in range(8) for session in group(f"g{number}", 1)))
    sent = [event.group_id for event in bench.outbox.events if isinstance(event, ev.GroupCompleted)]
    assert sent == ["g0", "g1", "g2"]


def test_an_unacknowledged_event_ends_the_process_and_holds_the_mark(bench: Bench) -> None:
    bench.take(flat(group(size=1)))
    bench.outbox.sent[0][1](PublishTimeout("nobody knows"))
    assert [type(failure) for failure in bench.failures] == [PublishTimeout]
    assert bench.worker.low_water(0) == 0


def test_a_full_store_raises_and_holds_the_mark(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    bench = Bench(tmp_path / "file")
    with pytest.raises(StoreError):
        bench.take(flat(group(size=1)))
    assert (bench.outbox.events, bench.worker.low_water(0)) == ([], 0)


def test_bytes_that_do_not_decode_become_a_dead_letter_which_holds_the_mark(bench: Bench) -> None:
    bench.take([b"no event", *flat(group(size=1))])
    letter, done = bench.outbox.sent
    assert letter[0] == ev.identified(
        ev.DeadLetter(
            run_id="run", occurred_at=7000, topic="rollout.segments.v1", partition=0, offset=0, key=b"key",
            reason="unknown_event: no schema has this fingerprint", raw=b"no event",
        )
    )  # fmt: skip
    done[1](Position(0, 0))
    assert bench.worker.low_water(0) == 0
    letter[1](Position(0, 0))
    assert bench.worker.low_water(0) == 6


def test_an_impossible_record_becomes_a_dead_letter_with_its_reason(bench: Bench) -> None:
    bench.take([Session(sample=5).claim()])
    (letter,) = bench.outbox.events
    assert isinstance(letter, ev.DeadLetter)
    assert (letter.reason, letter.offset) == ("sample_out_of_range", 0)


def large(bench: Bench, session: Session) -> ev.TokenSegment:
    segment = session.segment(0, [1], [2, 3])
    table = pa.table(
        [[segment.context_ids], [segment.output_ids], [segment.output_logprobs]], schema=SEGMENT_COLUMNS
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    ref = bench.store.put("run", "g", 0, memoryview(sink.getvalue()), SEGMENT_COLUMNS_CODEC)
    return msgspec.structs.replace(
        segment, context_ids=b"", output_ids=b"", output_logprobs=b"", tokens_ref=ref
    )


def test_the_columns_of_a_large_segment_come_from_the_store(bench: Bench) -> None:
    session = Session()
    bench.take([large(bench, session), session.end(1)])
    (event,) = bench.outbox.events
    assert isinstance(event, ev.GroupCompleted)
    assert bench.store.open_arrow(event.payload)["tokens"].to_pylist() == [[1, 2, 3]]


def spoil(path: Path) -> None:
    path.write_bytes(b"other bytes")


@pytest.mark.parametrize(
    ("damage", "says"), [(Path.unlink, "is gone"), (spoil, "does not hold the recorded bytes")]
)
def test_a_large_segment_without_its_columns_is_a_dead_letter(
    bench: Bench, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    segment = large(bench, Session())
    assert segment.tokens_ref is not None
    damage(tmp_path / segment.tokens_ref.uri)
    bench.take([segment])
    (letter,) = bench.outbox.events
    assert isinstance(letter, ev.DeadLetter)
    assert says in letter.reason


def test_columns_of_a_closed_attempt_may_be_gone(bench: Bench, tmp_path: Path) -> None:
    """Read again after a restart, when the archiver has deleted them: the record is no dead letter."""
    segment = large(bench, Session())
    bench.take([segment, Session().end(1)])
    assert segment.tokens_ref is not None
    (tmp_path / segment.tokens_ref.uri).unlink()
    bench.worker.forget()
    bench.take([segment, Session().end(1)])
    assert [type(event) for event in bench.outbox.events] == [ev.GroupCompleted]
    assert bench.worker.counts["closed_attempt"] == 2


def test_while_records_are_left_only_the_log_says_what_is_late(bench: Bench) -> None:
    claim = Session().claim()
    bench.take([claim])
    bench.now = claim.occurred_at + 60 * SECOND
    bench.worker.tick(lambda partition, offset: False)
    assert bench.outbox.events == []
    bench.worker.tick(lambda partition, offset: (partition, offset) == (0, 1))
    assert [type(event) for event in bench.outbox.events] == [ev.GroupFailed]


def test_a_writer_whose_clock_is_wrong_ends_no_other_group_and_its_own_in_time(bench: Bench) -> None:
    claim = Session("g").claim()
    ahead = msgspec.structs.replace(Session("ahead").claim(), occurred_at=claim.occurred_at + 1000 * SECOND)
    bench.take([claim, ahead])
    bench.now = claim.occurred_at + 5 * SECOND
    for to_the_end in (False, True):
        bench.worker.tick(lambda _partition, _offset, read=to_the_end: read)  # type: ignore[misc]
    assert bench.outbox.events == []
    bench.now += 10 * SECOND
    bench.worker.tick(lambda _partition, _offset: True)
    assert {event.group_id for event in bench.outbox.events if isinstance(event, ev.GroupFailed)} == {
        "g",
        "ahead",
    }


def test_after_a_seek_what_was_sent_is_not_sent_again_and_holds_the_mark_until_it_is_acknowledged(
    bench: Bench,
) -> None:
    events = flat(group(size=1))
    bench.take(events)
    bench.worker.forget()
    assert bench.worker.low_water(0) is None
    bench.worker.forget()
    bench.take(events)
    assert len(bench.outbox.events) == 1
    assert bench.worker.low_water(0) == 0
    bench.outbox.sent[0][1](Position(0, 0))
    assert bench.worker.low_water(0) == 5


def test_a_frozen_worker_commits_nothing(bench: Bench) -> None:
    bench.take(flat(group(size=1)))
    bench.worker.freeze()
    assert bench.worker.low_water(0) is None
