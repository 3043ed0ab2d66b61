"""The embedded broker is a real Kafka: it keeps what was acknowledged, and it goes when its owner goes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, KafkaError, Producer
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from schemas.errors import ConfigError, TransportError
from stack.broker import embedded
from stack.broker.embedded import EmbeddedKafka
from stack.broker.ready import await_broker

pytestmark = pytest.mark.broker
ROOT = Path(__file__).parents[2]


def create_topic(bootstrap: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(20)


def produce(bootstrap: str, topic: str, values: list[bytes]) -> None:
    """Every value is acknowledged when this returns."""
    failures: list[KafkaError] = []
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: failures.append(error) if error else None)
    assert producer.flush(20) == 0
    assert failures == []


def consume(bootstrap: str, topic: str, count: int) -> list[bytes]:
    """The first `count` values of the topic, through a consumer group."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "reader", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([topic])
    values: list[bytes] = []
    deadline = time.monotonic() + 30
    while len(values) < count and time.monotonic() < deadline:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            values.append(message.value() or b"")
    consumer.close()
    return values


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return False


def test_what_is_produced_is_consumed(kafka: str) -> None:
    create_topic(kafka, "echo")
    values = [b"first", b"second", b"x" * 5_000_000]  # a record beyond Kafka's default of 1 MB
    producer = Producer({"bootstrap.servers": kafka, "message.max.bytes": 10_485_760})
    for value in values:
        producer.produce("echo", value)
    assert producer.flush(20) == 0
    assert consume(kafka, "echo", 3) == values


def test_records_and_offsets_do_not_expire_and_topics_do_not_appear_by_themselves(kafka: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka})
    broker = ConfigResource(ResourceType.BROKER, "1")
    settings = {
        name: entry.value for name, entry in admin.describe_configs([broker])[broker].result(20).items()
    }
    assert settings["log.retention.ms"] == "-1"
    assert settings["auto.create.topics.enable"] == "false"
    assert int(settings["offsets.retention.minutes"]) > 365 * 24 * 60


def test_a_temporary_broker_leaves_nothing() -> None:
    broker = EmbeddedKafka()
    broker.start()
    data_dir, pid = broker.data_dir, broker.pid
    assert (data_dir / "broker.log").exists()
    broker.stop()
    assert not data_dir.exists()
    assert not psutil.pid_exists(pid)
    broker.stop()  # may be repeated


def test_a_kept_directory_survives_kill_and_stop_on_the_same_port(tmp_path: Path) -> None:
    broker = EmbeddedKafka(tmp_path / "dir with é")
    try:
        first = broker.start()
        create_topic(first, "kept")
        produce(first, "kept", [b"before the crash"])
        broker.kill()
        assert not broker.alive
        assert broker.start() == first
        produce(first, "kept", [b"after the crash"])
        broker.stop()
        again = EmbeddedKafka(tmp_path / "dir with é")
        with again:
            assert again.bootstrap_servers == first
            assert consume(first, "kept", 2) == [b"before the crash", b"after the crash"]
    finally:
        broker.stop()


@contextmanager
def taken(port: int) -> Iterator[None]:
    """Somebody else has it: a free port that is chosen by chance may be the old one."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        yield


def test_a_kept_directory_may_move_to_another_port(tmp_path: Path) -> None:
    with EmbeddedKafka(tmp_path) as broker:
        first = broker.bootstrap_servers
        create_topic(first, "moved")
        produce(first, "moved", [b"value"])
    (tmp_path / "ports.json").unlink()
    with taken(int(first.rpartition(":")[2])), EmbeddedKafka(tmp_path) as broker:
        assert broker.bootstrap_servers != first
        assert consume(broker.bootstrap_servers, "moved", 1) == [b"value"]


def test_two_brokers_cannot_share_a_directory_and_the_first_goes_on(tmp_path: Path) -> None:
    with EmbeddedKafka(tmp_path) as broker:
        with pytest.raises(ConfigError, match="in use by a running broker"):
            EmbeddedKafka(tmp_path).start()
        assert AdminClient({"bootstrap.servers": broker.bootstrap_servers}).list_topics(timeout=10).brokers


def test_a_broker_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with EmbeddedKafka(tmp_path):
        pass
    (tmp_path / "log" / "not-a-partition-directory").mkdir()  # Kafka refuses to load such a log
    broker = EmbeddedKafka(tmp_path)
    with pytest.raises(TransportError, match="ended before it was ready") as failed:
        broker.start()
    assert "not-a-partition-directory" in failed.value.message
    assert not broker.alive


def test_the_foreground_command_is_the_broker_itself(tmp_path: Path) -> None:
    broker = EmbeddedKafka(tmp_path / "data", log_file=tmp_path / "logs" / "broker.log")
    process = subprocess.Popen(broker.command(), cwd=ROOT, start_new_session=True)
    try:
        await_broker(broker.bootstrap_servers, 60, lambda: process.poll() is None)
        assert "java" in psutil.Process(process.pid).exe()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
        assert "Kafka Server started" in (tmp_path / "logs" / "broker.log").read_text()
    finally:
        process.kill()
        process.wait(30)


def test_the_foreground_command_says_in_one_line_why_it_cannot(tmp_path: Path) -> None:
    (tmp_path / "ports.json").write_text("{")
    done = subprocess.run(
        [sys.executable, "-m", "stack.broker", "--data", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("config_error: ")
    assert done.stderr.count("\n") == 1


OWNER = """
import sys, threading, time
from pathlib import Path
from stack.broker.embedded import EmbeddedKafka
broker = EmbeddedKafka(Path(sys.argv[1]))
starter = threading.Thread(target=broker.start)  # the broker must not end with the thread that asked for it
starter.start()
starter.join()
print(broker.pid, flush=True)
time.sleep(600)
"""


def test_the_broker_outlives_the_thread_that_started_it_and_dies_with_its_process(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, tmp_path], cwd=ROOT, stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None
            pid = int(owner.stdout.readline())
            java = psutil.Process(pid)
            log = (tmp_path / "broker.log").read_text()
            assert java.is_running()
            assert "Kafka Server started" in log
        finally:
            os.kill(owner.pid, signal.SIGKILL)
    assert eventually(lambda: not java.is_running() or java.status() == psutil.STATUS_ZOMBIE)


def test_the_last_lines_are_those_of_this_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("an older start\n")
    since = log.stat().st_size
    log.write_text("an older start\n" + "\n".join(f"line {n}" for n in range(40)))
    assert embedded.last_lines(log, since).splitlines() == [f"line {n}" for n in range(25, 40)]
