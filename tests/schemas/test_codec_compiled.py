"""The compiled codecs are shortcuts: what they give is what the reference gives, bytes and events, the unusual included."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from example_events import GOLDEN, example
from hypothesis import example as case
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import events as ev
from schemas.avro_numbers import ONE_BYTE, SMALL, number_at, number_bytes
from schemas.avro_reader import READER_GIVES_UP, compile_reader
from schemas.avro_writer import WRITER_GIVES_UP, compile_writer
from schemas.codec import (
    HEADER_SIZE,
    decode,
    decode_by_reference,
    encode,
    encode_by_reference,
    released_schemas,
)
from schemas.errors import IncompatibleEvent, SchemaError
from schemas.events import EVENT_TYPES, Event

LONGS = st.integers(-(2**63), 2**63 - 1) | st.integers(-70, 9000) | st.integers(1_700_000_000_000_000, 2**51)
NEWEST = {event_type: json.loads(text) for event_type, _, text in released_schemas()}


def _values(hint: Any) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(st.none() if a is type(None) else _values(a) for a in arguments)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        few = st.lists(_values(arguments[0]), max_size=3)
        return (few | few.map(lambda items: items * 40)).map(tuple)
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), _values(arguments[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _structs(hint)
    texts = st.text(max_size=6) | st.text("ab", min_size=60, max_size=70) | st.just("é" * 5000)
    return {str: texts, int: LONGS, float: st.floats(), bool: st.booleans(), bytes: st.binary(max_size=200)}[
        hint
    ]


def _structs(struct: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(struct)
    return st.fixed_dictionaries(
        {f.name: _values(hints[f.name]) for f in msgspec.structs.fields(struct)}
    ).map(lambda values: struct(**values))


EVENTS = st.sampled_from(EVENT_TYPES).flatmap(_structs)


def _compiled(event: Event) -> bytes:
    return compile_writer(NEWEST[type(event)], encode(example(type(event), full=False))[:HEADER_SIZE])(event)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_the_compiled_writer_gives_the_references_bytes(event: Event) -> None:
    assert encode(event) == encode_by_reference(event)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_the_compiled_reader_gives_the_references_event(event: Event) -> None:
    raw = encode_by_reference(event)
    again = decode(raw)
    assert type(again) is type(event)
    # by bytes: a NaN is not equal to itself
    assert encode_by_reference(again) == raw
    assert repr(again) == repr(decode_by_reference(raw))


@pytest.mark.parametrize("event_type", EVENT_TYPES)
@pytest.mark.parametrize("full", [True, False])
def test_usual_events_need_no_reference(event_type: type[Event], full: bool) -> None:
    event = example(event_type, full=full)
    raw = encode_by_reference(event)
    assert _compiled(event) == raw
    assert compile_reader(NEWEST[event_type], event_type)(raw, HEADER_SIZE) == event


def _outcome(work: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return repr(work(argument))
    except SchemaError as wrong:
        return type(wrong), wrong.detail


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(EVENT_TYPES), st.booleans(), st.binary(max_size=12), st.data())
def test_damaged_bytes_mean_what_they_mean_to_the_reference(
    event_type: type[Event], full: bool, junk: bytes, data: st.DataObject
) -> None:
    raw = encode(example(event_type, full=full))
    at = data.draw(st.integers(HEADER_SIZE, len(raw)))
    cut = data.draw(st.integers(0, len(junk)))
    damaged = raw[:at] + junk + raw[at + cut :]
    assert _outcome(decode, damaged) == _outcome(decode_by_reference, damaged)


ODD_NUMBERS = (
    b"\xc7\x01",  # -100: a length must not be negative
    b"\x81\x00", b"\x80\x00", b"\x80\x80\x00",  # longer than need be
    b"\xff" * 9 + b"\x01", b"\xfe" + b"\xff" * 8 + b"\x01", b"\xff" * 8 + b"\x7f",  # the ends of a long
    b"\x80" * 9 + b"\x02", b"\xff" * 9 + b"\x7f", b"\xff" * 12 + b"\x01",  # beyond them
)  # fmt: skip


@pytest.mark.parametrize("odd", ODD_NUMBERS, ids=bytes.hex)
def test_odd_numbers_mean_what_they_mean_to_the_reference(odd: bytes) -> None:
    event = ev.SessionClaimed(
        event_id="i", run_id="r", occurred_at=5, session_id="s", epoch=7, parent_traj_id="p", group_id="g", attempt=9,
        sample_index=1, claimant="c", restart=True,
    )  # fmt: skip
    raw = encode(event)
    for at in range(HEADER_SIZE, len(raw)):
        damaged = raw[:at] + odd + raw[at + 1 :]
        assert _outcome(decode, damaged) == _outcome(decode_by_reference, damaged)


@pytest.mark.parametrize("byte", [0, 1, 2, 127, 128, 255])
def test_a_boolean_means_what_it_means_to_the_reference(byte: int) -> None:
    raw = encode(example(ev.SessionClaimed, full=True))
    assert raw[-1] == 1
    assert _outcome(decode, raw[:-1] + bytes([byte])) == _outcome(
        decode_by_reference, raw[:-1] + bytes([byte])
    )


WRONG = (
    None, 1, -1, 1.5, float("nan"), True, False, "x", "\ud800", b"x", bytearray(b"x"), memoryview(b"x"), 2**63,
    -(2**63) - 1, (), (1,), {}, {"a": 1}, np.int64(3), np.float64(0.5), np.int32(9000),
)  # fmt: skip


@pytest.mark.parametrize("event_type", EVENT_TYPES)
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_value_of_another_type_means_what_it_means_to_the_reference(
    event_type: type[Event], value: Any
) -> None:
    event = example(event_type, full=True)
    for field in msgspec.structs.fields(event_type):
        changed = msgspec.structs.replace(event, **{field.name: value})
        assert _outcome(encode, changed) == _outcome(encode_by_reference, changed), field.name


@given(LONGS)
@case(SMALL - 1)
@case(SMALL)
@case(2**63 - 1)
@case(-(2**63))
def test_numbers_come_back(number: int) -> None:
    """Those of one byte are looked up in a table by the readers themselves."""
    raw = number_bytes(number)
    found = (ONE_BYTE[raw[0]], 1) if len(raw) == 1 else number_at(raw + b"\x00\x00", 0)
    assert found == (number, len(raw))


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 1.0, True, "1", None])
def test_what_is_no_long_is_not_written(number: Any) -> None:
    with pytest.raises(WRITER_GIVES_UP):
        number_bytes(number)


def test_blocks_that_tell_their_size_are_read_by_the_reference() -> None:
    """Avro lets a writer put a block's size behind a negative count; ours never does."""
    event = ev.StepCompleted(
        run_id="r", occurred_at=1, step=1, batch_id="b", digest="d", checkpoint_step=1, metrics={"a": 0.5}
    )
    raw = encode(event)
    plain = b"\x02\x02a" + raw[raw.index(b"\x02\x02a") + 3 :][:8]
    sized = raw.replace(plain, b"\x01\x14" + plain[1:])
    assert sized != raw
    assert decode(sized) == event
    with pytest.raises(READER_GIVES_UP):
        compile_reader(NEWEST[ev.StepCompleted], ev.StepCompleted)(sized, HEADER_SIZE)


def test_an_older_schemas_fields_that_the_class_has_no_more_are_passed_over() -> None:
    schema = {"type": "record", "name": "Older", "fields": [
        {"name": "gone", "type": {"type": "record", "name": "Inner", "fields": [{"name": "x", "type": "string"}]}},
        {"name": "list_gone", "type": {"type": "array", "items": "Inner"}},
        {"name": "uri", "type": "string"}, {"name": "sha256", "type": "string"}, {"name": "size", "type": "long"},
        {"name": "codec", "type": "string"}, {"name": "map_gone", "type": {"type": "map", "values": "double"}},
    ]}  # fmt: skip
    raw = b"\x04ab" + b"\x02\x02c\x00" + b"\x02u\x02s\x0e\x02c" + b"\x00"
    assert compile_reader(schema, ev.PayloadRef)(raw, 0) == ev.PayloadRef("u", "s", 7, "c")


@pytest.mark.parametrize("name", ["GroupCompleted.v1.full", "TokenSegment.v1.full"])
def test_golden_bytes_go_through_the_compiled_pair(name: str) -> None:
    raw = bytes.fromhex(json.loads(GOLDEN.read_text(encoding="utf-8"))[name]["hex"])
    event_type = getattr(ev, name.split(".", maxsplit=1)[0])
    event = compile_reader(NEWEST[event_type], event_type)(raw, HEADER_SIZE)
    assert compile_writer(NEWEST[event_type], raw[:HEADER_SIZE])(event) == raw


def test_text_that_is_no_unicode_is_incompatible() -> None:
    with pytest.raises(IncompatibleEvent):
        encode(ev.RunEnded(run_id="r", occurred_at=1, reason="\ud800"))


@pytest.mark.parametrize(
    ("size", "right", "negative"),
    [(5, b"\x0a", b"\x0b"), (99, b"\xc6\x01", b"\xc7\x01"), (9000, b"\xd0\x8c\x01", b"\xd1\x8c\x01")],
)
def test_a_negative_length_is_incompatible_though_as_many_bytes_follow(
    size: int, right: bytes, negative: bytes
) -> None:
    raw = encode(ev.RunEnded(run_id="r", occurred_at=1, reason="x" * size))
    damaged = raw.replace(right + b"x", negative + b"x")
    assert damaged != raw
    with pytest.raises(IncompatibleEvent):
        decode(damaged)
