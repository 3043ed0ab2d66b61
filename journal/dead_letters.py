"""Dead letters looked through and put back: `dead_letters.v1` holds what a record itself made unusable, with its bytes.

A letter is put back as it was (key, bytes, headers) at the end of the topic it came from, with a header that names the letter.
Then the letter is written once more with a header that says so: repeats have the same id, so that every consumer counts it
once, and nobody puts it back a second time by accident. A crash between the two may put it back twice, which the consumers'
own idempotence makes harmless; the other order could lose it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from journal.event_log import read_events
from journal.producer import AckProducer
from journal.reader import TopicReader, record_at
from schemas import topics
from schemas.codec import encode
from schemas.errors import ConfigError
from schemas.events import DeadLetter
from schemas.letters import was_cut
from schemas.settings import KafkaSettings
from schemas.topics import Topic, key_of

Kept = Callable[[Topic, int, int], tuple[bytes | None, bytes] | None]
"""Key and bytes of the record of a partition that stood at an offset, from wherever deleted records are kept."""
LETTER_HEADER = "hoofprint-dead-letter"
"""On a record that was put back: id of its letter."""
REQUEUED_HEADER = "hoofprint-requeued"
"""On the repetition of a letter: it was put back."""


@dataclass(frozen=True, slots=True)
class Buried:
    """A letter, and whether it was put back."""

    letter: DeadLetter
    requeued: bool

    @property
    def topic(self) -> Topic | None:
        """Where it came from; None: a topic that we do not know (any more)."""
        return next((t for t in topics.ALL_TOPICS if self.letter.topic.endswith(t.name)), None)


@dataclass(frozen=True, slots=True)
class Requeued:
    """A letter that was put back, and where it stands now."""

    letter: DeadLetter
    partition: int
    offset: int


def dead_letters(kafka: KafkaSettings, run_id: str) -> list[Buried]:
    """The run's letters up to the present end, in the order in which they were written first."""
    reader = TopicReader(kafka, [topics.DEAD_LETTERS])
    letters: dict[str, DeadLetter] = {}
    requeued: set[str] = set()
    try:
        for record, event in read_events(reader.read_to_end(), on_bad=lambda _record, _wrong: None):
            if isinstance(event, DeadLetter) and event.run_id == run_id:
                letters.setdefault(event.event_id, event)
                if REQUEUED_HEADER in record.headers:
                    requeued.add(event.event_id)
    finally:
        reader.close()
    return [Buried(letter, letter_id in requeued) for letter_id, letter in letters.items()]


def chosen(
    buried: Iterable[Buried],
    *,
    topic: str | None = None,
    partition: int | None = None,
    offset: int | None = None,
    again: bool = False,
) -> list[Buried]:
    """Those from this place (None: any) that were not put back yet, or `again` all the same."""
    return [
        one
        for one in buried
        if (topic is None or (one.topic is not None and one.topic.name == topic))
        and (partition is None or one.letter.partition == partition)
        and (offset is None or one.letter.offset == offset)
        and (again or not one.requeued)
    ]


def _nowhere(_topic: Topic, _partition: int, _offset: int) -> None:
    return None


def requeue(
    kafka: KafkaSettings, buried: Iterable[Buried], kept: Kept = _nowhere
) -> tuple[list[Requeued], list[ConfigError]]:
    """Put these back; and why some of them cannot be: a topic of another version, or bytes that were cut and are gone."""
    producer = AckProducer(kafka, "dead-letters")
    done: list[Requeued] = []
    refused: list[ConfigError] = []
    try:
        for one in buried:
            try:
                done.append(_requeue(kafka, producer, one, kept))
            except ConfigError as cannot:
                refused.append(cannot)
    finally:
        producer.close()
    return done, refused


def _requeue(kafka: KafkaSettings, producer: AckProducer, buried: Buried, kept: Kept) -> Requeued:
    letter, topic = buried.letter, buried.topic
    if topic is None:
        raise ConfigError(f"there is no topic {letter.topic} to put a record back into", topic=letter.topic)
    key, value, headers = _whole(kafka, topic, letter, kept)
    named = {**headers, LETTER_HEADER: letter.event_id.encode()}
    at = producer.send_raw(topic, key, value, named).result()
    mark = {REQUEUED_HEADER: f"{topic.name}/{at.partition}/{at.offset}".encode()}
    producer.send_raw(topics.DEAD_LETTERS, key_of(letter), encode(letter), mark).result()
    return Requeued(letter, at.partition, at.offset)


def _whole(
    kafka: KafkaSettings, topic: Topic, letter: DeadLetter, kept: Kept
) -> tuple[bytes | None, bytes, Mapping[str, bytes]]:
    """Key, value and headers. A letter must fit into a record itself, so that those of a large one may be cut: the rest is
    where it was read, or where that was archived (without its headers)."""
    if not was_cut(letter):
        return letter.key, letter.raw, letter.headers
    source = record_at(kafka, topic, letter.partition, letter.offset)
    if source is not None and _begins_with(source.key, source.value, letter):
        return source.key, source.value, source.headers
    archived = kept(topic, letter.partition, letter.offset)
    if archived is not None and _begins_with(*archived, letter):
        return *archived, letter.headers
    raise ConfigError(
        f"the letter of {topic.name}/{letter.partition}/{letter.offset} holds the beginning of its record only, and the"
        " record is gone",
        topic=topic.name, partition=letter.partition, offset=letter.offset,
    )  # fmt: skip


def _begins_with(key: bytes | None, value: bytes, letter: DeadLetter) -> bool:
    """Whether this is the record that the letter was made of."""
    same_key = key == letter.key or bool(letter.key and key and key.startswith(letter.key))
    return same_key and value.startswith(letter.raw)
