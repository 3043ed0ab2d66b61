"""Columns follow from the event classes; a row comes back as the event said it."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from analytics_events import AT, admitted, published, segment

from analytics.columns import RawRow, event_columns, to_table, topic_schema
from analytics.tables import Archive
from schemas import events as ev
from schemas.codec import encode
from schemas.errors import ArchiveError, ConfigError
from schemas.tokens import pack_ids, pack_logprobs
from schemas.topics import ALL_TOPICS, CONTROL, DEAD_LETTERS, SEGMENTS, TOPIC_OF, Topic


def rows(events: list[ev.Event | None], topic: Topic) -> list[dict[str, object]]:
    made = [RawRow(0, n, 5, b"k", b"?" if e is None else encode(e), e) for n, e in enumerate(events)]
    return to_table(topic, made).to_pylist()


@pytest.mark.parametrize("topic", ALL_TOPICS, ids=lambda topic: topic.name)
def test_every_field_of_every_event_has_a_nullable_column(topic: Topic) -> None:
    schema = topic_schema(topic)
    for event_type in topic.events:
        fields = msgspec.structs.fields(event_type)
        assert len(event_columns(event_type)) == len(fields)
        assert set(event_columns(event_type)) <= set(schema.names)
    assert all(schema.field(name).nullable for name in schema.names)


def test_token_arrays_are_lists_and_times_are_timestamps() -> None:
    schema = topic_schema(SEGMENTS)
    assert schema.field("output_ids").type == pa.list_(pa.field("element", pa.int32()))
    assert schema.field("output_logprobs").type == pa.list_(pa.field("element", pa.float32()))
    assert schema.field("done_at").type == pa.timestamp("us", tz="UTC")
    assert schema.field("epoch").type == pa.int64()  # orders claims; no time to be shown
    assert topic_schema(CONTROL).field("drift").type.value_type.field("lag").type == pa.int64()


def test_values_come_back() -> None:
    end = ev.EndFacts(1, "completed", "done", 0.5, False, {"length": 0.25})
    (row,) = rows([segment("g", 0, 0, output=(3, 4, 5), end=end)], SEGMENTS)
    assert row["output_ids"] == [3, 4, 5]
    assert row["output_logprobs"] == [-0.5, -0.5, -0.5]
    assert row["spans"] == [{"version": "v0", "start": 0, "stop": 3}]
    assert row["received_at"] == dt.datetime.fromtimestamp(AT / 1e6, dt.UTC)
    assert row["end"]["components"] == [("length", 0.25)]  # type: ignore[index]
    assert (row["claimant"], row["event_type"]) == (None, "TokenSegment")


def test_maps_and_structs_in_lists_come_back() -> None:
    step = ev.StepCompleted(
        run_id="r", occurred_at=AT, step=1, batch_id="b", digest="d", checkpoint_step=1, metrics={"loss": 0.5},
        drift=(ev.LagDrift(1, 2, 0.1, 0.2, 0.3),),
    )  # fmt: skip
    (row,) = rows([step], CONTROL)
    assert row["metrics"] == [("loss", 0.5)]
    assert row["drift"] == [{"lag": 1, "tokens": 2, "mean": 0.1, "mean_abs": 0.2, "max_abs": 0.3}]


def test_torn_token_bytes_do_not_shift_other_rows() -> None:
    torn = msgspec.structs.replace(
        segment("g", 0, 0), output_ids=pack_ids([1, 2]) + b"\1", output_logprobs=pack_logprobs([-1.0])
    )
    found = rows([torn, None, segment("g", 0, 1, output=(7, 8, 9))], SEGMENTS)
    assert [row["output_ids"] for row in found] == [[1, 2], None, [7, 8, 9]]


def test_a_dead_letters_own_place_does_not_hide_the_records() -> None:
    letter = ev.DeadLetter(
        run_id="r",
        occurred_at=AT,
        topic="t",
        partition=3,
        offset=9,
        key=b"theirs",
        headers={"h": b"v"},
        reason="x",
        raw=b"bad",
    )
    (row,) = rows([letter], DEAD_LETTERS)
    assert (row["partition"], row["key"], row["kafka_offset"]) == (0, b"k", 0)
    assert (row["source_partition"], row["source_key"], row["source_offset"], row["source_raw"]) == (
        3,
        b"theirs",
        9,
        b"bad",
    )


class Contradiction(ev.Event, frozen=True, kw_only=True):
    step: str


def test_one_name_with_two_types_is_refused() -> None:
    topic = Topic("t", "run_id", 1, (ev.BatchRequested, Contradiction))
    with pytest.raises(ConfigError) as clash:
        topic_schema(topic)
    assert clash.value.detail["column"] == "step"


def test_a_table_of_older_software_gets_the_new_columns_and_keeps_its_rows(tmp_path: Path) -> None:
    archive = Archive(tmp_path, create=True)
    table = archive.table("control")
    assert table is not None
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("prompt_digest")
    older = to_table(CONTROL, [RawRow(0, 0, 5, b"k", encode(published("v0")), published("v0"))])
    archive.append("control", older.drop_columns(["prompt_digest"]), {0: 1})
    newer = Archive(tmp_path, create=True)
    newer.append(
        "control", to_table(CONTROL, [RawRow(0, 1, 5, b"k", encode(admitted("g")), admitted("g"))]), {0: 2}
    )
    found = Archive(tmp_path).table("control")
    assert found is not None
    stored = found.scan().to_arrow().sort_by("kafka_offset")
    assert stored["prompt_digest"].to_pylist() == [None, "d"]


def test_a_table_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    event = admitted("g")
    row = to_table(TOPIC_OF[type(event)], [RawRow(0, 0, 5, b"k", encode(event), event)])
    archive = Archive(tmp_path, create=True)
    (tmp_path / "archive" / "warehouse" / "hoofprint" / "control" / "data").write_text("no directory")
    with pytest.raises(ArchiveError, match="table control cannot be written"):
        archive.append("control", row, {0: 1})
    assert Archive(tmp_path).next_offsets("control") == {}
