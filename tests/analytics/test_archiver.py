"""Every record of the log stands in the archive exactly once, whatever dies in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from analytics_events import admitted, published, segment

from analytics.archiver import Archiver, archive_until
from analytics.columns import RawRow, to_table
from analytics.tables import OFFSETS, SNAPSHOTS_KEPT, Archive, writer_lock
from journal.producer import AckProducer
from journal.reader import Record
from journal.topic_admin import create_topics
from schemas.codec import encode
from schemas.errors import ReplayGap, SnapshotConflict
from schemas.events import Event
from schemas.settings import Settings
from schemas.topics import CONTROL, SEGMENTS, TOPIC_OF

pytestmark = pytest.mark.broker
ROOT = Path(__file__).parents[2]


@pytest.fixture
def settings(kafka: str, tmp_path: Path) -> Settings:
    made = Settings.model_validate(
        {
            "run": {"run_id": "arch", "directory": str(tmp_path)},
            "kafka": {
                "bootstrap_servers": kafka,
                "topic_prefix": f"arch-{os.getpid()}-{tmp_path.name}",
                "partitions": 2,
            },
            "archive": {"flush_s": 0.2},
        }
    )
    create_topics(made.kafka)
    return made


@pytest.fixture
def producer(settings: Settings) -> Iterator[AckProducer]:
    made = AckProducer(settings.kafka, "test")
    yield made
    made.close()


def events(start: int, count: int) -> list[Event]:
    made: list[Event] = [published(f"v{start}")]
    for number in range(start, start + count):
        made += [admitted(f"g{number}"), segment(f"g{number}", 0, number)]
    return made


def archived(settings: Settings, name: str) -> list[bytes]:
    table = Archive(settings.run_directory).table(name)
    assert table is not None
    return sorted(table.scan().to_arrow()["raw"].to_pylist())


def raws(sent: list[Event], topic: object) -> list[bytes]:
    return sorted(encode(event) for event in sent if TOPIC_OF[type(event)] is topic)


def send(producer: AckProducer, sent: list[Event]) -> None:
    for event in sent:
        producer.send(event)
    producer.flush()


def test_it_goes_on_after_the_last_snapshot(settings: Settings, producer: AckProducer) -> None:
    first, second = events(0, 20), events(20, 7)
    send(producer, first)
    archive_until(settings)
    send(producer, second)
    archive_until(settings)
    archive_until(settings)
    assert archived(settings, "control") == raws([*first, *second], CONTROL)
    assert archived(settings, "segments") == raws([*first, *second], SEGMENTS)


def test_offsets_stand_in_the_snapshot_of_their_rows(settings: Settings, producer: AckProducer) -> None:
    send(producer, events(0, 3))
    archive_until(settings)
    table = Archive(settings.run_directory).table("control")
    assert table is not None
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert json.loads(snapshot.summary.additional_properties[OFFSETS]) == {"0": 4}


KILLED_AT_COMMIT = """
import os, signal, sys
from pathlib import Path
from pyiceberg.catalog.sql import SqlCatalog
from analytics.archiver import archive_until
from schemas.settings import Settings

commit, left = SqlCatalog.commit_table, [int(sys.argv[2])]

def die_before_commit(self, table, requirements, updates):
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return commit(self, table, requirements, updates)

SqlCatalog.commit_table = die_before_commit
archive_until(Settings.from_json(Path(sys.argv[1]).read_text()))
"""


@pytest.mark.parametrize("commits_before", [0, 1])
def test_killed_between_files_and_commit_nothing_is_lost_or_doubled(
    settings: Settings, producer: AckProducer, tmp_path: Path, commits_before: int
) -> None:
    sent = events(0, 10)
    send(producer, sent)
    file = tmp_path / "settings.json"
    file.write_text(settings.to_json())
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_AT_COMMIT, file, str(commits_before)], cwd=ROOT, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert list((settings.run_directory / "archive" / "warehouse").rglob("*.parquet"))
    archive_until(settings)
    assert archived(settings, "control") == raws(sent, CONTROL)
    assert archived(settings, "segments") == raws(sent, SEGMENTS)


ARCHIVER = """
import sys
from pathlib import Path
from analytics.archiver import main
from schemas.settings import Settings
sys.exit(main(Settings.from_json(Path(sys.argv[1]).read_text())))
"""


def test_the_process_archives_while_it_runs_and_everything_up_to_sigterm(
    settings: Settings, producer: AckProducer, tmp_path: Path
) -> None:
    file = tmp_path / "settings.json"
    file.write_text(settings.to_json())
    first, second = events(0, 5), events(5, 50)
    send(producer, first)
    process = subprocess.Popen([sys.executable, "-c", ARCHIVER, file], cwd=ROOT, start_new_session=True)
    try:
        assert eventually((settings.run_directory / "archive" / "catalog.db").exists)
        archive_until(settings, timeout_s=60)  # waits for the running archiver: two never write
        assert archived(settings, "control") == raws(first, CONTROL)
        send(producer, second)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(30)
    assert archived(settings, "control") == raws([*first, *second], CONTROL)
    assert archived(settings, "segments") == raws([*first, *second], SEGMENTS)


def test_a_record_that_does_not_decode_is_archived_as_its_bytes(
    settings: Settings, producer: AckProducer
) -> None:
    producer.send_raw(CONTROL, b"run", b"not an event").result(20)
    send(producer, [admitted("g1")])
    archive_until(settings)
    table = Archive(settings.run_directory).table("control")
    assert table is not None
    rows = (
        table.scan().to_arrow().sort_by("kafka_offset").select(["event_type", "raw", "group_id"]).to_pylist()
    )
    assert rows[0] == {"event_type": None, "raw": b"not an event", "group_id": None}
    assert (rows[1]["event_type"], rows[1]["group_id"]) == ("GroupAdmitted", "g1")


def test_a_missing_offset_is_an_error(settings: Settings) -> None:
    archiver = Archiver(Archive(settings.run_directory, create=True), settings.kafka, settings.archive)
    raw = encode(admitted("g1"))
    archiver.accept([Record(CONTROL, 0, 0, 0, b"run", raw, {})])
    with pytest.raises(ReplayGap) as gap:
        archiver.accept([Record(CONTROL, 0, 2, 0, b"run", raw, {})])
    assert gap.value.detail == {"topic": "control.v1", "partition": 0, "expected": 1, "found": 2}
    archiver.close()


def test_a_second_writer_is_kept_out_and_its_commit_fails(tmp_path: Path) -> None:
    with writer_lock(tmp_path) as first, writer_lock(tmp_path) as second:
        assert (first, second) == (True, False)
    one, two = Archive(tmp_path, create=True), Archive(tmp_path, create=True)
    rows = one_row(admitted("g1"))
    one.append("control", rows, {0: 1})
    with pytest.raises(SnapshotConflict):
        two.append("control", rows, {0: 1})
    assert len(Archive(tmp_path).data_files("control")) == 1


def test_a_commit_of_a_long_run_has_no_more_to_carry_than_that_of_a_short_one(tmp_path: Path) -> None:
    """Neither snapshots nor manifests add up; rows and offsets are all there, also for who opens the archive anew."""
    archive = Archive(tmp_path, create=True)
    count = 2 * SNAPSHOTS_KEPT + 10
    for number in range(count):
        event = admitted(f"g{number}")
        archive.append(
            "control", to_table(CONTROL, [RawRow(0, number, 0, None, encode(event), event)]), {0: number + 1}
        )
    for seen in (archive, Archive(tmp_path, create=True)):
        table = seen.table("control")
        assert table is not None
        snapshot = table.current_snapshot()
        assert snapshot is not None
        assert len(table.metadata.snapshots) <= SNAPSHOTS_KEPT
        assert len(snapshot.manifests(table.io)) <= SNAPSHOTS_KEPT
        assert seen.next_offsets("control") == {0: count}
        assert sorted(table.scan().to_arrow()["kafka_offset"].to_pylist()) == list(range(count))
        assert len(seen.data_files("control")) == count


def test_an_archive_of_before_gets_the_properties_that_keep_it_small(tmp_path: Path) -> None:
    table = Archive(tmp_path, create=True).table("control")
    assert table is not None
    with table.transaction() as change:
        change.remove_properties("commit.manifest-merge.enabled")
    again = Archive(tmp_path, create=True).table("control")
    assert again is not None
    assert again.properties["commit.manifest-merge.enabled"] == "true"


def one_row(event: Event) -> pa.Table:
    return to_table(TOPIC_OF[type(event)], [RawRow(0, 0, 0, None, encode(event), event)])


def eventually(holds: object) -> bool:
    assert callable(holds)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return False
