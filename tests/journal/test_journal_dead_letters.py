"""Dead letters: listed once, put back whole with their key, and not a second time by accident."""

from __future__ import annotations

import pytest

from journal.dead_letters import LETTER_HEADER, Buried, chosen, dead_letters, requeue
from journal.producer import AckProducer, Position
from journal.reader import Record, TopicReader
from schemas import topics
from schemas.events import DeadLetter, identified
from schemas.letters import letter_of, was_cut
from schemas.settings import KafkaSettings

pytestmark = pytest.mark.broker


def letter(
    at: Position,
    raw: bytes,
    *,
    reason: str = "unknown_event: x",
    topic: str = topics.SEGMENTS.name,
    run: str = "r",
) -> DeadLetter:
    return identified(
        DeadLetter(
            run_id=run, occurred_at=1, topic=topic, partition=at.partition, offset=at.offset, key=b"g",
            headers={"h": b"1"}, reason=reason, raw=raw,
        )
    )  # fmt: skip


def records(log: KafkaSettings, topic: topics.Topic) -> list[Record]:
    reader = TopicReader(log, [topic])
    found = list(reader.read_to_end())
    reader.close()
    return found


def bury(log: KafkaSettings, value: bytes, *, keep: int | None = None) -> DeadLetter:
    """A record in the segments topic and its letter, as the assembler writes it; `keep`: so many bytes of it."""
    producer = AckProducer(log, "test")
    at = producer.send_raw(topics.SEGMENTS, b"g", value, {"h": b"1"}).result()
    reason = "unknown_event: x" if keep is None else f"unknown_event: x (first {keep} of {len(value)} bytes)"
    made = letter(at, value[:keep], reason=reason)
    for _ in range(2):  # the assembler may write it again after a crash
        producer.publish(made)
    producer.close()
    return made


def test_a_letter_goes_back_with_its_key_its_bytes_and_a_header_and_only_once(log: KafkaSettings) -> None:
    first, second = bury(log, b"junk"), bury(log, b"more junk")
    assert dead_letters(log, "r") == [Buried(first, False), Buried(second, False)]
    ((done,), _) = requeue(log, chosen(dead_letters(log, "r"), offset=first.offset))
    back = records(log, topics.SEGMENTS)[-1]
    assert (back.partition, back.offset) == (done.partition, done.offset)
    assert (back.key, back.value) == (b"g", b"junk")
    assert back.headers == {"h": b"1", LETTER_HEADER: first.event_id.encode()}
    assert back.partition == first.partition
    assert dead_letters(log, "r") == [Buried(first, True), Buried(second, False)]
    assert chosen(dead_letters(log, "r")) == [Buried(second, False)]
    assert len(chosen(dead_letters(log, "r"), again=True)) == 2
    requeue(log, chosen(dead_letters(log, "r")))
    assert requeue(log, chosen(dead_letters(log, "r"))) == ([], [])
    assert len(records(log, topics.SEGMENTS)) == 4


def test_other_runs_letters_are_theirs(log: KafkaSettings) -> None:
    producer = AckProducer(log, "test")
    producer.publish(letter(Position(0, 0), b"x", run="other"))
    producer.close()
    assert dead_letters(log, "r") == []


def test_a_letter_that_was_cut_goes_back_whole_from_where_it_was_read(log: KafkaSettings) -> None:
    made = bury(log, b"0123456789", keep=4)
    assert was_cut(made)
    requeue(log, dead_letters(log, "r"))
    assert records(log, topics.SEGMENTS)[-1].value == b"0123456789"


def test_a_letter_whose_record_is_gone_goes_back_unless_it_was_cut_and_holds_no_other_back(
    log: KafkaSettings,
) -> None:
    gone = letter(Position(0, 78), b"half", reason="x (first 4 of 8 bytes)")
    done, (refused,) = requeue(log, [Buried(gone, False), Buried(letter(Position(0, 77), b"whole"), False)])
    assert [record.value for record in records(log, topics.SEGMENTS)] == [b"whole"]
    assert len(done) == 1
    assert "the beginning of its record only" in refused.message


def test_a_record_with_more_key_and_headers_than_a_letter_holds_goes_back_as_it_was(
    log: KafkaSettings,
) -> None:
    """What the local client takes at most is 1 MB; a letter has to leave room for its own fields."""
    producer = AckProducer(log, "test")
    for key, headers in ((b"g", {"h": b"x" * 960_000}), (b"k" * 960_000, {})):
        at = producer.send_raw(topics.SEGMENTS, key, b"junk", headers).result()
        made = letter_of(
            "r", topics.SEGMENTS.name, at.partition, at.offset, 1, "why", key, b"junk", headers.items()
        )
        producer.publish(made)
        _, refused = requeue(log, chosen(dead_letters(log, "r")))
        assert refused == []
        back = [
            r for r in records(log, topics.SEGMENTS) if r.headers.get(LETTER_HEADER) == made.event_id.encode()
        ]
        assert [
            (r.key, r.value, {n: v for n, v in r.headers.items() if n != LETTER_HEADER}) for r in back
        ] == [(key, b"junk", headers)]
    producer.close()


def test_a_topic_may_be_named_with_the_brokers_prefix_and_an_unknown_one_is_refused(
    log: KafkaSettings,
) -> None:
    full = topics.PROMPTS.full_name(log.topic_prefix)
    prefixed = Buried(letter(Position(0, 5), b"p", topic=full), False)
    assert chosen([prefixed], topic=topics.PROMPTS.name) == [prefixed]
    requeue(log, [prefixed])
    assert [record.value for record in records(log, topics.PROMPTS)] == [b"p"]
    _, (refused,) = requeue(log, [Buried(letter(Position(0, 5), b"p", topic="nowhere"), False)])
    assert "no topic nowhere" in refused.message
