"""What the controller wrote already, read from the ends of its output topics at every assignment.

A controller waits for the acknowledgement of all effects of a record before it writes the next record's. So all effects of
earlier causes are in the log, and only those of the last cause may be there in part: its indices tell which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from journal.event_log import read_events
from journal.reader import Record, TopicReader, record_at
from schemas import topics
from schemas.codec import decode
from schemas.errors import InvariantBroken, SchemaError
from schemas.events import DeadLetter, Effect
from schemas.settings import KafkaSettings
from schemas.topics import Topic

_FIRST_LOOK = 256
_PARTITION = 0


@dataclass(slots=True)
class Written:
    """Effects of the newest cause in one topic. `last_cause` -1: none."""

    topic: Topic
    last_cause: int = -1
    ids: dict[int, str] = field(default_factory=dict)
    has_earlier_cause: bool = False

    def add(self, effect: Effect) -> None:
        """An effect that stands in the topic; order does not matter."""
        if effect.cause_offset > self.last_cause:
            self.has_earlier_cause = self.last_cause >= 0
            self.last_cause, self.ids = effect.cause_offset, {effect.index: effect.event_id}
        elif effect.cause_offset == self.last_cause:
            self.ids[effect.index] = effect.event_id
        else:
            self.has_earlier_cause = True

    def lacks(self, effect: Effect) -> bool:
        """Whether the effect has still to be written. InvariantBroken: the fold gives another one than was written."""
        if effect.cause_offset != self.last_cause:
            return effect.cause_offset > self.last_cause
        there = self.ids.get(effect.index)
        if there is not None and there != effect.event_id:
            raise InvariantBroken(
                f"{self.topic.name} holds another effect than the fold of {topics.CONTROL.name} gives",
                topic=self.topic.name,
                cause_offset=effect.cause_offset,
                index=effect.index,
                written=there,
                folded=effect.event_id,
            )
        return there is None


def read_written(kafka: KafkaSettings, topic: Topic, run_id: str) -> Written:
    """Backwards from the end in growing steps, until the effects of the last cause are whole."""
    look = _FIRST_LOOK
    while True:
        reader = TopicReader(kafka, [topic], partitions={topic.name: [_PARTITION]})
        try:
            place = (topic.name, _PARTITION)
            low, high = reader.positions()[place], reader.end_offsets()[place]
        finally:
            reader.close()
        start = max(low, high - look)
        written = Written(topic)
        for effect in _effects(kafka, topic, start, run_id):
            written.add(effect)
        if written.has_earlier_cause or start == low:
            return written
        look *= 8


def _effects(kafka: KafkaSettings, topic: Topic, start: int, run_id: str) -> Iterable[Effect]:
    reader = TopicReader(
        kafka, [topic], start={(topic.name, _PARTITION): start}, partitions={topic.name: [_PARTITION]}
    )
    try:
        for _, event in read_events(reader.read_to_end(), on_bad=lambda _record, _wrong: None):
            if isinstance(event, Effect) and event.run_id == run_id:
                yield event
    finally:
        reader.close()


def read_buried(kafka: KafkaSettings, run_id: str) -> set[int]:
    """Offsets of `control.v1` that are in the dead letters already."""
    reader = TopicReader(kafka, [topics.DEAD_LETTERS])
    try:
        return {
            event.offset
            for _, event in read_events(reader.read_to_end(), on_bad=lambda _record, _wrong: None)
            if isinstance(event, DeadLetter) and event.run_id == run_id and event.topic == topics.CONTROL.name
        }
    finally:
        reader.close()


def records_until(kafka: KafkaSettings, start: int, stop: int) -> Iterator[Record]:
    """Records of `control.v1` from offset `start` up to `stop`, as far as there are any."""
    if start >= stop:
        return
    reader = TopicReader(kafka, [topics.CONTROL], start={(topics.CONTROL.name, _PARTITION): start})
    try:
        for record in reader.read_to_end():
            if record.offset >= stop:
                return
            yield record
    finally:
        reader.close()


def holds(kafka: KafkaSettings, offset: int, event_id: str) -> bool:
    """Whether this event stands at this place of `control.v1`."""
    record = record_at(kafka, topics.CONTROL, _PARTITION, offset)
    try:
        return record is not None and decode(record.value).event_id == event_id
    except SchemaError:
        return False
