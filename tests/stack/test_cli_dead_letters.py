"""`hoofprint dead-letters` on a live broker, and what it says without one."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from journal.producer import AckProducer
from journal.topic_admin import create_topics
from schemas import topics
from schemas.events import DeadLetter, identified
from schemas.settings import Settings, load
from stack.cli import app
from stack.run_directory import write_settings


def hoofprint(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "140"}).invoke(app, ["dead-letters", *arguments])


def run_at(bootstrap_servers: str, tmp_path: Path) -> Settings:
    run_id = uuid.uuid4().hex[:8]
    settings = load(
        sets=(
            f"run.directory={tmp_path}", f"run.run_id={run_id}", f"kafka.topic_prefix={run_id}",
            f"kafka.bootstrap_servers={bootstrap_servers}",
        )
    )  # fmt: skip
    settings.run_directory.mkdir()
    write_settings(settings)
    return settings


@pytest.mark.broker
def test_letters_are_listed_and_put_back_by_their_place(kafka: str, tmp_path: Path) -> None:
    settings = run_at(kafka, tmp_path)
    create_topics(settings.kafka)
    producer = AckProducer(settings.kafka, "test")
    for offset, reason in ((3, "unknown_event: x"), (9, "no_group")):
        producer.publish(
            identified(
                DeadLetter(
                    run_id=settings.run.run_id, occurred_at=1, topic=topics.SEGMENTS.name, partition=1, offset=offset, key=b"g",
                    reason=reason, raw=b"12345",
                )
            )
        )  # fmt: skip
    producer.close()
    run = str(settings.run_directory)
    shown = hoofprint("list", run).output
    assert [word in shown for word in ("rollout.segments.v1", "unknown_event: x", "no_group", " 5 ")] == [
        True
    ] * 4
    assert "yes" not in shown
    put_back = hoofprint("requeue", run, "--topic", topics.SEGMENTS.name, "--offset", "9").output
    assert "rollout.segments.v1/1/9 is now at" in put_back
    assert "1 put back" in put_back
    assert "yes" in hoofprint("list", run).output
    assert "1 put back" in hoofprint("requeue", run).output
    assert "0 put back" in hoofprint("requeue", run).output
    assert "2 put back" in hoofprint("requeue", run, "--again").output


def test_without_a_broker_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stack.cli_dead_letters._PATIENCE_S", 0.2)
    settings = run_at("127.0.0.1:1", tmp_path)
    result = hoofprint("list", str(settings.run_directory))
    assert result.exit_code == 2
    assert "no Kafka broker answers at 127.0.0.1:1" in result.output
