"""Records go from the log when the archive, the assembler and every session have done with them, on a real broker."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from analytics_events import RUN, segment
from confluent_kafka import Consumer, TopicPartition
from typer.testing import CliRunner

from analytics.archiver import Archiver, archive_until
from analytics.collecting import Collecting
from analytics.record_collector import RecordCollector
from analytics.tables import Archive
from journal.clock import system_clock
from journal.producer import AckProducer
from journal.reader import TopicReader, log_bounds
from journal.topic_admin import create_topics
from schemas import events as ev
from schemas.errors import ReplayGap
from schemas.settings import Settings
from schemas.topics import DEAD_LETTERS, SEGMENTS
from stack.cli import app
from stack.run_directory import write_settings

pytestmark = pytest.mark.broker
ROOT = Path(__file__).parents[2]
HOUR_US = 3600 * 1_000_000


@pytest.fixture
def settings(kafka: str, tmp_path: Path) -> Settings:
    made = Settings.model_validate(
        {
            "run": {"run_id": RUN, "directory": str(tmp_path)},
            "kafka": {"bootstrap_servers": kafka, "topic_prefix": uuid.uuid4().hex[:8], "partitions": 1},
            "archive": {"flush_s": 0.2, "collect_after_s": 0.0},
        }
    )
    create_topics(made.kafka)
    return made


@pytest.fixture
def producer(settings: Settings) -> Iterator[AckProducer]:
    made = AckProducer(settings.kafka, "test")
    yield made
    made.close()


def free(name: str, index: int = 0) -> ev.TokenSegment:
    made = segment("g", 0, index)
    return msgspec.structs.replace(made, kind="free", session_id=name, group_id=None, attempt=None)


def verdict(group: str) -> ev.Verdict:
    return ev.identified(
        ev.Verdict(
            run_id=RUN, occurred_at=1, group_id=group, attempt=0, outcome="kept", reason="", cause_offset=0, index=0
        )
    )  # fmt: skip


def send(producer: AckProducer, *events: ev.Event) -> None:
    for event in events:
        producer.send(event)
    producer.flush()


def commit(settings: Settings, offset: int, name: str = "assembler") -> None:
    """What the assembler's group says of the one partition."""
    kafka = settings.kafka
    client = Consumer(
        {"bootstrap.servers": kafka.bootstrap_servers, "group.id": f"{kafka.topic_prefix}.{RUN}.{name}"}
    )
    client.commit(
        offsets=[TopicPartition(SEGMENTS.full_name(kafka.topic_prefix), 0, offset)], asynchronous=False
    )
    client.close()


def bounds(settings: Settings) -> tuple[int, int]:
    return log_bounds(settings.kafka, [SEGMENTS])[SEGMENTS.name, 0]


class Pass:
    """An archiver of its own for each pass, as after a restart."""

    def __init__(self, settings: Settings) -> None:
        self._archive = Archive(settings.run_directory, create=True)
        self._archiver = Archiver(self._archive, settings.kafka, settings.archive)
        self.settings = settings

    def records(self, later_us: int = 0) -> RecordCollector:
        made = RecordCollector(self.settings, self._archive, self.catch_up, lambda: system_clock() + later_us)
        self._archiver.on_row = made.told
        return made

    def catch_up(self) -> None:
        self._archiver.catch_up(self._archiver.end_offsets())

    def close(self) -> None:
        self._archiver.close()
        self._archive.close()


def collect(settings: Settings, later_us: int = 0) -> int:
    one = Pass(settings)
    try:
        return one.records(later_us).collect()
    finally:
        one.close()


def test_everything_goes_that_is_archived_assembled_and_judged(
    settings: Settings, producer: AckProducer
) -> None:
    send(producer, *(segment("g", sample, 0) for sample in range(6)), verdict("g"))
    archive_until(settings)
    commit(settings, 4)
    assert collect(settings) == 4
    assert bounds(settings) == (4, 6)
    assert collect(settings) == 0
    commit(settings, 6)
    assert collect(settings) == 2
    assert bounds(settings) == (6, 6)


def test_without_a_mark_of_the_assembler_nothing_goes(settings: Settings, producer: AckProducer) -> None:
    send(producer, segment("g", 0, 0), verdict("g"))
    archive_until(settings)
    commit(settings, 1, "controller")  # another group's mark says nothing
    assert collect(settings) == 0
    assert bounds(settings) == (0, 1)


def test_what_is_not_archived_stays(settings: Settings, producer: AckProducer) -> None:
    """The mark is ahead of the archive, and the archive cannot be brought up to it."""
    send(producer, segment("g", 0, 0), segment("g", 1, 0), verdict("g"))
    archive_until(settings)
    send(producer, segment("g", 2, 0))
    commit(settings, 3)
    archive = Archive(settings.run_directory, create=True)
    assert RecordCollector(settings, archive, lambda: None, system_clock).collect() == 2
    assert bounds(settings) == (2, 3)
    archive.close()


def test_young_records_stay_for_as_long_as_was_set(settings: Settings, producer: AckProducer) -> None:
    tree = settings.model_dump(mode="json")
    tree["archive"]["collect_after_s"] = 3600.0
    patient = Settings.model_validate(tree)
    send(producer, segment("g", 0, 0), verdict("g"))
    archive_until(patient)
    commit(patient, 1)
    assert collect(patient, HOUR_US - 60_000_000) == 0
    assert collect(patient, HOUR_US + 1_000_000) == 1


def test_an_open_session_keeps_all_that_came_since_it_began(
    settings: Settings, producer: AckProducer
) -> None:
    send(producer, segment("g", 0, 0), free("s"), segment("h", 0, 0), verdict("g"), verdict("h"))
    archive_until(settings)
    commit(settings, 3)
    assert collect(settings) == 1
    send(producer, free("s", 1))
    day = int(settings.proxy.session_max_age_s * 1_000_000)
    assert collect(settings, day - HOUR_US) == 0
    assert bounds(settings) == (1, 4)
    commit(settings, 4)
    assert collect(settings, day + HOUR_US) == 3


def test_a_session_that_went_on_in_what_is_not_archived_yet_is_open(
    settings: Settings, producer: AckProducer
) -> None:
    """The archiver was away: by its archive the session is as old as its last record there."""
    send(producer, free("s"))
    archive_until(settings)
    commit(settings, 1)
    one = Pass(settings)
    collector = one.records(int(settings.proxy.session_max_age_s * 1_000_000) + HOUR_US)
    later = AckProducer(settings.kafka, "later")
    row = free("s", 1)
    later.send(row)
    later.close()
    told = collector.told

    def as_if_new(record: object) -> None:  # the broker cannot be made to stamp a later day
        assert hasattr(record, "timestamp_ms")
        told(msgspec.structs.replace(record, timestamp_ms=record.timestamp_ms + 25 * 3_600_000))  # type: ignore[type-var]

    one._archiver.on_row = as_if_new
    assert collector.collect() == 0
    assert bounds(settings) == (0, 2)
    one.close()


KILLED = """
import os, signal, sys
from pathlib import Path
import analytics.record_collector as collector
from analytics.archiver import Archiver
from analytics.tables import Archive
from schemas.settings import Settings

delete = collector.delete_before

def die(*arguments):
    if sys.argv[2] == "behind":
        delete(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

collector.delete_before = die
settings = Settings.from_json(Path(sys.argv[1]).read_text())
archive = Archive(settings.run_directory, create=True)
archiver = Archiver(archive, settings.kafka, settings.archive)
collector.RecordCollector(settings, archive, lambda: archiver.catch_up(archiver.end_offsets())).collect()
"""


@pytest.mark.parametrize("where", ["before", "behind"])
def test_killed_around_the_deletion_the_next_pass_does_the_rest_and_archives_on(
    settings: Settings, producer: AckProducer, tmp_path: Path, where: str
) -> None:
    send(producer, *(segment("g", sample, 0) for sample in range(4)), verdict("g"))
    archive_until(settings)
    commit(settings, 4)
    file = tmp_path / "settings.json"
    file.write_text(settings.to_json())
    killed = subprocess.run([sys.executable, "-c", KILLED, file, where], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert bounds(settings)[0] == (4 if where == "behind" else 0)
    send(producer, segment("h", 0, 0))
    assert collect(settings) == (0 if where == "behind" else 4)
    archive_until(settings)
    table = Archive(settings.run_directory).table("segments")
    assert table is not None
    assert sorted(table.scan().to_arrow()["kafka_offset"].to_pylist()) == [0, 1, 2, 3, 4]


def test_an_archive_that_does_not_hold_what_was_deleted_says_so(
    settings: Settings, producer: AckProducer, tmp_path: Path
) -> None:
    """A second archiver with a directory of its own, or one whose archive was lost: never an archive with a hole."""
    send(producer, segment("g", 0, 0), segment("g", 1, 0), verdict("g"))
    archive_until(settings)
    commit(settings, 2)
    assert collect(settings) == 2
    tree = settings.model_dump(mode="json")
    tree["run"]["directory"] = str(tmp_path / "elsewhere")
    with pytest.raises(ReplayGap) as gap:
        archive_until(Settings.model_validate(tree))
    assert gap.value.detail == {"topic": SEGMENTS.name, "partition": 0, "expected": 0, "found": 2}
    archive_until(settings)


def test_it_is_off_by_setting(settings: Settings, producer: AckProducer) -> None:
    tree = settings.model_dump(mode="json")
    tree["archive"] |= {"delete_records": False, "collect_every_s": 0.001}
    kept = Settings.model_validate(tree)
    send(producer, segment("g", 0, 0), verdict("g"))
    archive_until(kept)
    commit(kept, 1)
    archive = Archive(kept.run_directory, create=True)
    Collecting(kept, archive, lambda: None).collect_if_due(lambda: False)
    assert bounds(kept) == (0, 1)
    Collecting(settings, archive, lambda: None).collect_if_due(lambda: False)
    assert bounds(kept) == (1, 1)
    archive.close()


def test_a_dead_letter_that_was_cut_comes_back_whole_from_the_archive(
    settings: Settings, producer: AckProducer
) -> None:
    settings.run_directory.mkdir(parents=True, exist_ok=True)
    write_settings(settings)
    raw = b"no event at all"
    at = producer.send_raw(SEGMENTS, b"g", raw, {}).result()
    letter = ev.DeadLetter(
        run_id=RUN, occurred_at=1, topic=SEGMENTS.name, partition=at.partition, offset=at.offset, key=b"g",
        reason=f"unknown_event: x (first 4 of {len(raw)} bytes)", raw=raw[:4],
    )  # fmt: skip
    send(producer, ev.identified(letter))
    archive_until(settings)
    commit(settings, 1)
    assert collect(settings) == 1
    told = CliRunner().invoke(app, ["dead-letters", "requeue", str(settings.run_directory)])
    assert "1 put back" in told.output
    reader = TopicReader(settings.kafka, [SEGMENTS, DEAD_LETTERS])
    assert [record.value for record in reader.read_to_end() if record.topic is SEGMENTS] == [raw]
    reader.close()
