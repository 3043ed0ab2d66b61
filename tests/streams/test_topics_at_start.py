"""Topics before a worker starts: the missing are made, others than the settings say end the process with a sentence."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_processes import Child, Surroundings

from journal.topic_admin import number_of_partitions
from schemas import topics
from schemas.settings import Settings

pytestmark = pytest.mark.broker
PARTS = ("streams.assembler_app", "streams.controller_app", "streams.feeder")


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.end()


@pytest.mark.parametrize("part", PARTS)
def test_other_partitions_than_the_settings_say_end_the_process(
    kafka: str, tmp_path: Path, children: list[Child], part: str
) -> None:
    around = Surroundings(kafka, tmp_path, uuid.uuid4().hex[:8], prompts=1, kafka__partitions=2)
    tree = json.loads(around.file.read_text())
    tree["kafka"]["partitions"] = 3
    around.file.write_text(json.dumps(tree))
    children.append(Child(part, around.file))
    assert children[0].process.wait(40) == 2
    assert "has 2 partitions, the settings say 3" in children[0].log
    around.close()


def test_a_worker_that_starts_first_makes_the_topics(
    kafka: str, tmp_path: Path, children: list[Child]
) -> None:
    tree = {
        "run": {"run_id": "first", "directory": str(tmp_path)},
        "kafka": {"bootstrap_servers": kafka, "topic_prefix": uuid.uuid4().hex[:8], "partitions": 3},
    }
    settings = Settings.model_validate(tree)
    file = tmp_path / "settings.json"
    file.write_text(settings.to_json())
    children.append(Child("streams.assembler_app", file))
    while '"event":"working"' not in children[0].log:
        assert children[0].process.poll() is None
    assert number_of_partitions(settings.kafka, topics.SEGMENTS) == 3
    assert number_of_partitions(settings.kafka, topics.CONTROL) == 1
    assert children[0].stop() == 0
