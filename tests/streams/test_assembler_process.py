"""The assembler as a process on a real broker: kill -9, SIGTERM, two at a time, what ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from assembler_sessions import group
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from journal.clock import system_clock
from journal.payloads import PayloadStore
from journal.producer import AckProducer
from journal.reader import TopicReader, end_offsets
from journal.record_deletion import committed_offsets, delete_before
from journal.topic_admin import create_topics
from schemas import events as ev
from schemas import topics
from schemas.codec import decode
from schemas.ids import worker_group
from schemas.settings import GroupSettings, KafkaSettings, RunSettings, Settings

pytestmark = pytest.mark.broker

RUN_IT = (
    "import sys; from schemas.settings import Settings; from streams.assembler_app import main; "
    "sys.exit(main(Settings.from_json(sys.argv[1])))"
)


class Stage:
    """Topics of their own, assemblers as child processes, and what they say in control.v1."""

    def __init__(self, kafka: str, directory: Path) -> None:
        self.settings = Settings(
            run=RunSettings(run_id="run", directory=str(directory)),
            kafka=KafkaSettings(
                bootstrap_servers=kafka, topic_prefix=uuid.uuid4().hex[:8], publish_timeout_s=5
            ),
            group=GroupSettings(size=4, timeout_s=60),
        )
        create_topics(self.settings.kafka)
        self.producer = AckProducer(self.settings.kafka, "test")
        self.control = TopicReader(self.settings.kafka, [topics.CONTROL])
        self.admin = AdminClient({"bootstrap.servers": kafka})
        self.children: list[subprocess.Popen[bytes]] = []
        self.log = directory / "assembler.log"
        self.said: list[ev.Event] = []

    def start(self, **payload: str) -> subprocess.Popen[bytes]:
        settings = self.settings.model_copy(
            update={"payload": self.settings.payload.model_copy(update=payload)} if payload else {}
        )
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        with self.log.open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-c", RUN_IT, settings.to_json()], stderr=log, start_new_session=True,
                cwd=Path(__file__).parents[2], env=environment,
            )  # fmt: skip
        self.children.append(child)
        return child

    def produce(self, names: list[str], size: int = 4, at: int | None = None) -> None:
        for name in names:
            sessions = group(name, size, at=system_clock() if at is None else at)
            for step in zip(*sessions, strict=True):
                for event in step:
                    self.producer.send(event)
        self.producer.flush()

    def until(self, enough: Callable[[], bool], what: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not enough():
            assert time.monotonic() < deadline, f"{what}\n{self.log.read_text()[-3000:]}"
            self.said += [decode(record.value) for record in self.control.poll(0.2)]

    def completions(self) -> Counter[str]:
        return Counter(event.group_id for event in self.said if isinstance(event, ev.GroupCompleted))

    def working_members(self) -> int:
        """Members of the assemblers' group that have partitions."""
        name = f"{self.settings.kafka.topic_prefix}.run.assembler"
        try:
            described = self.admin.describe_consumer_groups([name], request_timeout=5)[name].result(10)
        except (KafkaException, TimeoutError):  # the group's coordinator is not ready yet
            return 0
        return sum(bool(member.assignment.topic_partitions) for member in described.members)

    def send(self, groups: dict[str, list[list[ev.Event]]], part: slice) -> None:
        """This part of each session."""
        for sessions in groups.values():
            for session in sessions:
                for event in session[part]:
                    self.producer.send(event)
        self.producer.flush()

    def close(self) -> None:
        for child in self.children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait(10)
        self.producer.close()
        self.control.close()


@pytest.fixture
def stage(kafka: str, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(kafka, tmp_path)
    yield stage
    stage.close()


def names(count: int, start: int = 0) -> list[str]:
    return [f"g{number}" for number in range(start, start + count)]


def test_kill_9_in_the_middle_loses_no_group_and_every_repetition_is_the_same_fact(stage: Stage) -> None:
    first = stage.start()
    stage.produce(names(32))
    # half of each later group is in the log when the first one dies: its state dies with it
    halves = {name: group(name, 4, at=system_clock()) for name in names(32, 32)}
    stage.send(halves, slice(2))
    stage.until(lambda: len(stage.completions()) >= 8, "the first assembler completes nothing")
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(10)
    stage.send(halves, slice(2, None))

    second = stage.start()
    stage.until(lambda: set(stage.completions()) == set(names(64)), "groups are missing")
    second.send_signal(signal.SIGTERM)
    assert second.wait(20) == 0
    stage.said += [decode(record.value) for record in stage.control.read_to_end()]

    assert not [event for event in stage.said if isinstance(event, ev.GroupFailed)]
    facts = {(event.event_id, event) for event in stage.said if isinstance(event, ev.GroupCompleted)}
    assert len(facts) == 64  # a repetition is the same event, byte for byte
    store = PayloadStore(stage.settings.payload_url)
    for _, event in facts:
        assert store.open_arrow(event.payload).num_rows == event.sequences == 4


def test_after_a_clean_stop_nothing_is_done_again(stage: Stage) -> None:
    child = stage.start()
    stage.produce(names(8))
    stage.until(lambda: len(stage.completions()) == 8, "groups are missing")
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 0
    stage.start()
    stage.produce(names(4, 8))
    stage.until(lambda: len(stage.completions()) == 12, "groups are missing after the restart")
    assert set(stage.completions().values()) == {1}


def test_killed_while_records_are_deleted_up_to_its_marks_it_goes_on(stage: Stage) -> None:
    """Half of each later group is in the log when it dies; what lies below the marks goes meanwhile."""
    first = stage.start()
    stage.produce(names(32))
    halves = {name: group(name, 4, at=system_clock()) for name in names(16, 32)}
    for step in range(2):
        for sessions in halves.values():
            for session in sessions:
                stage.producer.send(session[step])
    stage.producer.flush()
    stage.until(lambda: len(stage.completions()) == 32, "groups are missing")
    kafka, name = stage.settings.kafka, worker_group(stage.settings.kafka.topic_prefix, "run", "assembler")
    marks: dict[int, int] = {}

    def moved() -> bool:
        marks.update(committed_offsets(kafka, name, topics.SEGMENTS))
        return len(marks) == kafka.partitions and min(marks.values()) > 0

    stage.until(moved, "the marks do not move")
    assert delete_before(kafka, topics.SEGMENTS, marks) == marks
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(10)
    stage.send(halves, slice(2, None))
    stage.start()
    stage.until(lambda: set(stage.completions()) == set(names(48)), "groups are missing after the restart")
    assert not [event for event in stage.said if isinstance(event, ev.GroupFailed)]
    assert "records_were_deleted" not in stage.log.read_text()


def test_records_deleted_above_its_mark_are_reported_and_the_rest_goes_on(stage: Stage) -> None:
    """Nobody of ours does it; whoever did must hear of it."""
    child = stage.start()
    stage.produce(names(8))
    stage.until(lambda: len(stage.completions()) == 8, "groups are missing")
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 0
    stage.produce(names(8, 8))
    ends = {
        partition: end for (_, partition), end in end_offsets(stage.settings.kafka, [topics.SEGMENTS]).items()
    }
    delete_before(stage.settings.kafka, topics.SEGMENTS, ends)
    stage.start()
    stage.produce(names(8, 16))
    stage.until(lambda: set(names(8, 16)) <= set(stage.completions()), "groups are missing after the restart")
    assert "records_were_deleted" in stage.log.read_text()


def test_a_second_worker_takes_its_share_and_what_is_left_of_a_killed_one(stage: Stage) -> None:
    first, second = stage.start(), stage.start()
    stage.until(lambda: stage.working_members() == 2, "the second worker has no partitions")
    stage.produce(names(16))
    stage.until(lambda: set(stage.completions()) == set(names(16)), "groups are missing with two workers")
    os.killpg(first.pid, signal.SIGKILL)
    stage.produce(names(16, 16))
    stage.until(lambda: set(stage.completions()) == set(names(32)), "groups of the killed worker are missing")
    assert second.poll() is None


def test_a_dead_letter_is_written_and_the_rest_goes_on(stage: Stage) -> None:
    stage.start()
    stage.producer.send_raw(topics.SEGMENTS, b"g0", b"no event", {"from": b"x"}).result(10)
    stage.produce(names(4))
    stage.until(lambda: len(stage.completions()) == 4, "groups are missing")
    reader = TopicReader(stage.settings.kafka, [topics.DEAD_LETTERS])
    (letter,) = [decode(record.value) for record in reader.read_to_end()]
    assert isinstance(letter, ev.DeadLetter)
    assert (letter.raw, letter.key, letter.headers) == (b"no event", b"g0", {"from": b"x"})
    reader.close()


def test_a_store_that_takes_nothing_ends_the_process_with_a_line_and_loses_nothing(stage: Stage) -> None:
    blocked = stage.log.parent / "blocked"
    blocked.write_bytes(b"")
    child = stage.start(url=str(blocked))
    stage.produce(names(2))
    assert child.wait(60) == 1
    assert '"code":"store_error"' in stage.log.read_text()
    stage.start()
    stage.until(lambda: len(stage.completions()) == 2, "groups are missing after the restart")


def test_a_time_out_fails_the_group_once(stage: Stage) -> None:
    stage.start()
    stage.produce(names(1), size=3, at=0)  # from 1970, and the fourth never comes
    stage.until(lambda: any(isinstance(e, ev.GroupFailed) for e in stage.said), "no time-out")
    (event,) = [event for event in stage.said if isinstance(event, ev.GroupFailed)]
    assert (event.group_id, event.reason, len(event.trajectories)) == ("g0", "timeout", 3)
