"""What a feeder's start costs behind 50,000 groups: `control.v1`, the verdicts and the batches, folded from their beginning."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from journal.payloads import PayloadStore
from journal.producer import AckProducer
from journal.topic_admin import create_topics
from schemas import topics
from schemas.codec import decode
from schemas.settings import KafkaSettings, Settings
from streams.control_fold import fold
from streams.control_state import ControlState
from streams.feeder import Feeder, fold_arrived, follow_log


def write_effects(kafka: KafkaSettings, raw: Iterable[bytes], run_id: str) -> None:
    """What a controller would have made of the control log."""
    create_topics(kafka, [topics.VERDICTS, topics.BATCHES])
    producer, state = AckProducer(kafka, "bench"), ControlState(run_id)
    for offset, record in enumerate(raw):
        for effect in fold(state, offset, decode(record)):
            producer.post(effect)
    producer.close()


def start_s(settings: Settings, prompts: list[dict[str, Any]], scratch: Path) -> float:
    """Process CPU seconds until a feeder knows what the log says. SystemExit: it knows something else."""
    producer = AckProducer(settings.kafka, "bench-feeder")
    feeder = Feeder(settings, prompts, producer, PayloadStore(str(scratch / "payloads")))
    began = time.process_time()
    follower = follow_log(settings.kafka)
    while not follower.caught_up():
        fold_arrived(feeder, follower)
    seconds = time.process_time() - began
    follower.close()
    producer.close()
    state = feeder.state
    if state.admitted_groups != len(prompts) or state.kept_groups + len(state.open_groups) != len(prompts):
        raise SystemExit("the feeder's fold gives another state than was written")
    return seconds
