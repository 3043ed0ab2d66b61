"""Reading topics without a consumer group: explicit partitions and offsets, read_committed.

Who reads keeps the offsets (a snapshot, a mark, nothing at all); the broker is told nothing. Order holds per partition.
A start that was deleted meanwhile goes on at the earliest record there is; the offsets show the gap, `first_offsets` says so.
Nobody here writes transactions: a marker at the end of a partition would look like a record that never comes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from journal.connection import LOGGER, client_configuration
from journal.topic_admin import partition_ids
from schemas.errors import TransportError
from schemas.settings import KafkaSettings
from schemas.topics import Topic

A = TypeVar("A")
_CALL_S = 10.0
_BATCH = 500
_BROKEN = frozenset(
    {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._UNKNOWN_TOPIC}  # noqa: SLF001
)
# a fresh topic, or a broker that comes back: the partition's leader does not know of it yet
_NOT_YET = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._TRANSPORT,  # noqa: SLF001
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    }
)

Place = tuple[str, int]  # topic.name (without prefix), partition


class Record(NamedTuple):
    """One record as it stands in the log."""

    topic: Topic
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes
    headers: dict[str, bytes]


class TopicReader:
    """`start`: next offset to read per (topic.name, partition), missing = earliest. `partitions`: which, missing = all.

    One thread at a time: the client's offset query never returns while another thread polls. `end_offsets` (the function)
    has a connection of its own.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        topics: Sequence[Topic],
        start: Mapping[Place, int] | None = None,
        partitions: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._by_name = {topic.full_name(kafka.topic_prefix): topic for topic in topics}
        self._consumer = _consumer(kafka)
        self._held: list[Record] = []
        self._next: dict[Place, int] = {}
        given, chosen = start or {}, partitions or {}
        self._assignment: list[TopicPartition] = []
        for name, topic in self._by_name.items():
            wanted = chosen.get(topic.name)
            for number in partition_ids(kafka, topic) if wanted is None else wanted:
                offset = given.get((topic.name, number))
                if offset is None:
                    offset = self._watermarks(TopicPartition(name, number))[0]
                self._next[topic.name, number] = offset
                self._assignment.append(TopicPartition(name, number, offset))
        self._fetching = False

    def poll(self, timeout_s: float, max_records: int = _BATCH) -> list[Record]:
        """What has arrived, at most `max_records`; waits at most `timeout_s` for the first. TransportError: broken for good."""
        records = self._take_held(max_records) if self._held else self._fetch(timeout_s, max_records)
        for record in records:
            self._hand_out(record)
        return records

    def end_offsets(self) -> dict[Place, int]:
        """The offset behind the last record of each partition, now."""
        return {
            self._place(spot.topic, spot.partition): self._watermarks(spot)[1] for spot in self._assignment
        }

    def first_offsets(self) -> dict[Place, int]:
        """The first offset that was not deleted of each partition, now."""
        return {
            self._place(spot.topic, spot.partition): self._watermarks(spot)[0] for spot in self._assignment
        }

    def positions(self) -> dict[Place, int]:
        """The next offset to read of each partition."""
        return dict(self._next)

    def read_to_end(self) -> Iterator[Record]:
        """Records up to the end offsets at the time of the call. TransportError: the broker stays away."""
        ends = self._pass_over_deleted()
        batch: deque[Record] = deque()
        beyond: list[Record] = []
        heard_at = time.monotonic()
        try:
            while any(self._next[place] < end for place, end in ends.items()):
                batch.extend(self._fetch(0.5, _BATCH) if not self._held else self._take_held(_BATCH))
                if batch:
                    heard_at = time.monotonic()
                elif time.monotonic() - heard_at > 3 * _CALL_S:
                    raise TransportError("the broker sends nothing", waited_s=3 * _CALL_S)
                else:
                    self._pass_over_deleted()  # nobody will ever send them
                while batch:
                    record = batch.popleft()
                    if record.offset < ends[record.topic.name, record.partition]:
                        self._hand_out(record)
                        yield record
                    else:
                        beyond.append(record)
        finally:
            self._held = [*beyond, *batch, *self._held]  # for the next poll

    def close(self) -> None:
        """Leave; nothing is committed."""
        self._consumer.close()

    def _hand_out(self, record: Record) -> None:
        self._next[record.topic.name, record.partition] = record.offset + 1

    def _take_held(self, max_records: int) -> list[Record]:
        taken, self._held = self._held[:max_records], self._held[max_records:]
        return taken

    def _fetch(self, timeout_s: float, max_records: int) -> list[Record]:
        if not self._fetching:
            # Neither before, nor from an offset that was deleted: closing the client while it resets an offset that is out
            # of range never returns, and whoever finds nothing between start and end closes at once.
            self._pass_over_deleted()
            self._consumer.assign(
                [
                    TopicPartition(
                        spot.topic, spot.partition, self._next[self._place(spot.topic, spot.partition)]
                    )
                    for spot in self._assignment
                ]
            )
            self._fetching = True
        first = self._consumer.poll(timeout_s)
        if first is None:
            return []
        # `consume` alone would wait until it has as many as asked for
        rest = self._consumer.consume(max_records - 1, timeout=0.0) if max_records > 1 else []
        messages: list[Any] = [first, *rest]  # the client's own types leave every field optional
        return [self._record(message) for message in messages if not self._is_error(message)]

    def _pass_over_deleted(self) -> dict[Place, int]:
        """Go on at the first record that is left; the end offsets."""
        ends: dict[Place, int] = {}
        for spot in self._assignment:
            place = self._place(spot.topic, spot.partition)
            first, ends[place] = self._watermarks(spot)
            self._next[place] = max(self._next[place], first)
        return ends

    def _place(self, full_name: str, partition: int) -> Place:
        return self._by_name[full_name].name, partition

    def _watermarks(self, spot: TopicPartition) -> tuple[int, int]:
        return _watermarks(self._consumer, spot)

    def _record(self, message: Any) -> Record:
        topic, partition, offset = self._by_name[message.topic()], message.partition(), message.offset()
        headers = {name: value or b"" for name, value in message.headers() or ()}
        return Record(
            topic, partition, offset, message.timestamp()[1], message.key(), message.value() or b"", headers
        )

    def _is_error(self, message: Any) -> bool:
        error = message.error()
        if error is None:
            return False
        if error.fatal() or error.code() in _BROKEN:
            raise TransportError(f"the log cannot be read: {error.str()}", reason=error.name())
        return True


def end_offsets(kafka: KafkaSettings, topics: Sequence[Topic]) -> dict[Place, int]:
    """The offset behind the last record of each partition, now, with a connection of its own."""
    return {place: end for place, (_, end) in log_bounds(kafka, topics).items()}


def log_bounds(kafka: KafkaSettings, topics: Sequence[Topic]) -> dict[Place, tuple[int, int]]:
    """Of each partition the first offset that was not deleted, and the one behind the last record, now."""
    consumer = _consumer(kafka)
    try:
        return {
            (topic.name, number): _watermarks(
                consumer, TopicPartition(topic.full_name(kafka.topic_prefix), number)
            )
            for topic in topics
            for number in partition_ids(kafka, topic)
        }
    finally:
        consumer.close()


def newest_time_ms(kafka: KafkaSettings, topic: Topic) -> int:
    """The greatest timestamp of the topic's records, ms; 0 with none. TransportError: the broker does not say."""
    name = topic.full_name(kafka.topic_prefix)
    newest = OffsetSpec.max_timestamp()  # type: ignore[no-untyped-call]
    wanted = {TopicPartition(name, number): newest for number in partition_ids(kafka, topic)}
    client = AdminClient(client_configuration(kafka), logger=LOGGER)
    try:
        found = client.list_offsets(wanted, request_timeout=_CALL_S)
        return max((future.result(_CALL_S).timestamp for future in found.values()), default=0)
    except (KafkaException, TimeoutError) as away:
        raise TransportError(f"the newest record of {name} cannot be found", topic=name) from away


def record_at(kafka: KafkaSettings, topic: Topic, partition: int, offset: int) -> Record | None:
    """The record that stands there; None: none does (any more)."""
    reader = TopicReader(kafka, [topic], {(topic.name, partition): offset}, {topic.name: [partition]})
    try:
        record = next(iter(reader.read_to_end()), None)
    finally:
        reader.close()
    return record if record is not None and record.offset == offset else None


def offsets_at_time(
    kafka: KafkaSettings, topic: Topic, timestamp_ms: int, partitions: Sequence[int] | None = None
) -> dict[int, int]:
    """Per partition the first offset whose record is not older than `timestamp_ms`; the end offset with none."""
    name = topic.full_name(kafka.topic_prefix)
    numbers = partition_ids(kafka, topic) if partitions is None else partitions
    consumer = _consumer(kafka)
    try:
        asked = [TopicPartition(name, n, timestamp_ms) for n in numbers]
        found = _patiently(name, lambda: _answered(consumer.offsets_for_times(asked, timeout=_CALL_S)))
        return {
            spot.partition: spot.offset
            if spot.offset >= 0
            else _watermarks(consumer, TopicPartition(name, spot.partition))[1]
            for spot in found
        }
    finally:
        consumer.close()


def _watermarks(consumer: Consumer, spot: TopicPartition) -> tuple[int, int]:
    """First offset, and the one behind the last record."""
    return _patiently(
        f"{spot.topic}/{spot.partition}",
        lambda: consumer.get_watermark_offsets(spot, timeout=_CALL_S, cached=False),
    )


def _answered(spots: list[TopicPartition]) -> list[TopicPartition]:
    """A partition without an answer says so itself; its offset would pass for that of an empty one."""
    for spot in spots:
        if spot.error is not None:
            raise KafkaException(spot.error)
    return spots


def _patiently(what: str, ask: Callable[[], A]) -> A:
    """The answer about offsets; leaders that are not known yet, in a topic that was just made, will be."""
    deadline = time.monotonic() + _CALL_S
    while True:
        try:
            return ask()
        except KafkaException as away:
            if time.monotonic() < deadline and away.args[0].code() in _NOT_YET:
                time.sleep(0.05)
                continue
            raise TransportError(f"offsets of {what} cannot be read", topic=what) from away


def _consumer(kafka: KafkaSettings) -> Consumer:
    configuration: dict[str, Any] = {
        **client_configuration(kafka),
        "group.id": "hoofprint-reader",  # the client insists on a name; without a subscription no group comes into being
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "fetch.wait.max.ms": 100,
        "fetch.queue.backoff.ms": 50,
    }
    return Consumer(configuration, logger=LOGGER)
