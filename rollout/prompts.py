"""Reads `rollout.prompts.v1` as a member of the run's consumer group, in a thread of its own.

Invariant: an offset is committed only when every earlier record of its partition is finished. Records that cannot be
decoded go to the dead letters and count as finished. Partitions that are taken away: their groups are cancelled, the new
owner plays them again from scratch (its sessions are claimed with `restart`, so ours are void).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from journal.connection import LOGGER, client_configuration
from rollout.low_water import LowWater
from schemas.codec import decode_as
from schemas.errors import SchemaError, TransportError
from schemas.events import GroupRequested
from schemas.settings import KafkaSettings
from schemas.topics import PROMPTS

log = structlog.get_logger(__name__)

SESSION_TIMEOUT_MS = 6_000
"""A killed worker's groups go to another one after this time."""
_POLL_S = 0.1
_COMMIT_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prompt stands."""

    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Listener:
    """Called in the reading thread."""

    requested: Callable[[Place, GroupRequested], None]
    revoked: Callable[[set[int]], None]
    undecodable: Callable[[Message, SchemaError], None]
    ended: Callable[[TransportError | None], None]


class PromptSource:
    """One consumer. `finish` may be called from any thread."""

    def __init__(self, kafka: KafkaSettings, run_id: str, listener: Listener) -> None:
        self._topic = PROMPTS.full_name(kafka.topic_prefix)
        self._listener = listener
        self._marks: dict[int, LowWater] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._consumer = Consumer(_configuration(kafka, run_id), logger=LOGGER)
        self._thread = threading.Thread(target=self._read, name="prompts", daemon=True)

    def start(self) -> None:
        """Join the group and begin to read."""
        self._thread.start()

    def finish(self, place: Place) -> None:
        """The group attempt of this record needs no more work."""
        with self._lock:
            if place.partition in self._marks:
                self._marks[place.partition].finish(place.offset)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Commit what is finished and leave the group."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _read(self) -> None:
        failure: TransportError | None = None
        try:
            self._consumer.subscribe(
                [self._topic], on_assign=self._assigned, on_revoke=self._taken, on_lost=self._taken
            )
            polls = 0
            while not self._stopping.is_set():
                message = self._consumer.poll(_POLL_S)
                polls += 1
                if message is not None:
                    self._handle(message)
                if polls * _POLL_S >= _COMMIT_EVERY_S:
                    polls = 0
                    self._commit()
            self._commit(wait=True)
        except KafkaException as wrong:
            failure = TransportError(f"reading the prompts failed: {wrong}", topic=self._topic)
        except TransportError as wrong:  # a dead letter could not be written: its record stays uncommitted
            failure = wrong
        finally:
            self._consumer.close()
            self._listener.ended(failure)

    def _handle(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            if error.fatal():
                raise KafkaException(error)
            log.info("prompts_not_readable_now", error=error.str())
            return
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        place = Place(partition, offset)
        with self._lock:
            self._marks.setdefault(place.partition, LowWater()).begin(place.offset)
        try:
            event = decode_as(message.value() or b"", GroupRequested)
        except SchemaError as wrong:
            self._listener.undecodable(message, wrong)
            self.finish(place)
            return
        self._listener.requested(place, event)

    def _assigned(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        with self._lock:
            for partition in partitions:
                self._marks[partition.partition] = LowWater()

    def _taken(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._commit(wait=True)
        gone = {partition.partition for partition in partitions}
        with self._lock:
            for partition in gone:
                self._marks.pop(partition, None)
        self._listener.revoked(gone)

    def _commit(self, *, wait: bool = False) -> None:
        with self._lock:
            moved = {partition: mark.advance() for partition, mark in self._marks.items()}
        offsets = [TopicPartition(self._topic, p, mark) for p, mark in moved.items() if mark is not None]
        if not offsets:
            return
        try:
            if wait:
                self._consumer.commit(offsets=offsets, asynchronous=False)
            else:
                self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as wrong:  # the broker is away or the group moves: a later commit says more
            log.info("commit_not_possible_now", error=str(wrong))


def _configuration(kafka: KafkaSettings, run_id: str) -> dict[str, Any]:
    return {
        **client_configuration(kafka),
        "group.id": f"{run_id}-rollout",
        "client.id": "rollout",
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "session.timeout.ms": SESSION_TIMEOUT_MS,
        "heartbeat.interval.ms": SESSION_TIMEOUT_MS // 4,
        "error_cb": _say,
    }


def _say(error: KafkaError) -> None:
    log.info("broker_trouble", error=error.str())
