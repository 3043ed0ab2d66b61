"""Records that nobody of ours would write, at the processes on a real broker: each costs itself at most, never the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from assembler_sessions import RUN, Session
from confluent_kafka import Producer
from control_log import trajectory
from crash_run import CrashRun

from journal.clock import system_clock
from journal.dead_letters import dead_letters
from journal.payloads import PayloadStore
from schemas import events as ev
from schemas import topics
from schemas.arrow import SEGMENT_COLUMNS, SEGMENT_COLUMNS_CODEC

pytestmark = pytest.mark.broker
LONG_NAME = "ü" * 200


@pytest.fixture
def run(kafka: str, tmp_path: Path) -> Iterator[CrashRun]:
    run = CrashRun(kafka, tmp_path, "group.size=2", "batch.size=1")
    yield run
    run.close()


def put(
    run: CrashRun, topic: topics.Topic, key: bytes, value: bytes, headers: Sequence[tuple[str, bytes | None]]
) -> None:
    """A record as a client of any other make writes it."""
    producer = Producer(
        {"bootstrap.servers": run.settings.kafka.bootstrap_servers, "message.max.bytes": 8_000_000}
    )
    producer.produce(topic.full_name(run.settings.kafka.topic_prefix), value, key=key, headers=list(headers))
    assert producer.flush(20) == 0


def admit(run: CrashRun, name: str) -> None:
    run.producer.publish(
        ev.identified(
            ev.GroupAdmitted(
                run_id=RUN, occurred_at=1, group_id=name, attempt=0, group_size=2, prompt_index=0, dataset_epoch=0,
                prompt_digest="d",
            )
        )
    )  # fmt: skip


def roll_out(run: CrashRun, name: str, reason: str = "done") -> None:
    """A whole group."""
    admit(run, name)
    for index in range(2):
        session = Session(name, index, at=system_clock())
        run.producer.publish(session.segment(0, [1], [2, 3]))
        run.producer.publish(session.end(1, reward=float(index), reason=reason))


def other_columns(run: CrashRun, number: int, values: object, kind: pa.DataType) -> None:
    """A large segment whose file is an Arrow file of the right digest, and not the columns of a segment."""
    sink = pa.BufferOutputStream()
    table = pa.table({name: pa.array([values], kind) for name in SEGMENT_COLUMNS.names})
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    name = f"columns-{number}"
    ref = PayloadStore(run.settings.payload_url).put(
        RUN, name, 0, sink.getvalue().to_pybytes(), SEGMENT_COLUMNS_CODEC
    )
    segment = Session(name, 0, at=system_clock()).segment(0, [1], [2, 3])
    run.producer.publish(msgspec.structs.replace(segment, tokens_ref=ref))


def test_the_assembler_goes_on_behind_every_record(run: CrashRun) -> None:
    run.start("assembler", "assembler")
    put(run, topics.SEGMENTS, b"any", b"junk", [("h", None)])
    put(run, topics.SEGMENTS, b"k" * 3_000_000, b"junk", [])
    put(run, topics.SEGMENTS, b"any", b"j" * 2_000_000, [("h", b"x" * 2_000_000)])
    other_columns(run, 0, None, pa.binary())
    other_columns(run, 1, "text", pa.string())
    elsewhere = Session("elsewhere", 0, at=system_clock()).segment(0, [1], [2, 3])
    for uri in ("run/g", "run/g/0/\0", f"{'x' * 300}/g/0/00"):
        ref = ev.PayloadRef(uri, "00", 1, SEGMENT_COLUMNS_CODEC)
        run.producer.publish(msgspec.structs.replace(elsewhere, tokens_ref=ref))
    foreign = ev.GroupFailed(run_id="other", occurred_at=1, group_id="good", attempt=0, reason="timeout")
    run.producer.publish(ev.identified(foreign))
    for name in ("long-reason", LONG_NAME, "good"):
        roll_out(run, name, "r" * 700_000 if name == "long-reason" else "done")
    run.until(lambda: run.completed() == 3, "a group does not complete")
    run.until(lambda: len(dead_letters(run.settings.kafka, RUN)) == 8, "not every record has its letter")
    assert not run.endings


def test_the_controller_goes_on_behind_every_record_and_a_batch_may_be_large(run: CrashRun) -> None:
    run.start("controller", "controller")
    put(run, topics.CONTROL, RUN.encode(), b"junk", [("h", None)])
    put(run, topics.CONTROL, RUN.encode(), b"j" * 2_000_000, [])
    admit(run, "g")
    facts = [trajectory("g", 0, index, "v1" + "x" * 1000, 1.0) for index in range(1000)]
    large = ev.GroupCompleted(
        run_id=RUN, occurred_at=1, group_id="g", attempt=0, payload=ev.PayloadRef("u", "00", 1, "c"), sequences=1,
        trainable_tokens=1, trajectories=tuple(facts),
    )  # fmt: skip
    run.producer.publish(ev.identified(large))
    run.until(lambda: run.batched() == ["g"], "no batch")
    assert len(dead_letters(run.settings.kafka, RUN)) == 2
    assert not run.endings
