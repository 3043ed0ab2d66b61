"""The wire: golden bytes, fingerprints, agreement of classes and schemas, and what broken bytes give."""

from __future__ import annotations

import contextlib
import gc
import json
import types
import typing
from typing import Any

import msgspec
import pytest
from example_events import GOLDEN, example, golden_entries
from fastavro.schema import fingerprint
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import events as ev
from schemas.codec import HEADER_SIZE, MAGIC, decode, decode_as, encode, released_schemas
from schemas.errors import IncompatibleEvent, SchemaError, UnknownEvent
from schemas.events import EVENT_TYPES, Event

ENTRIES: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
HEADERS_NOW = {encode(example(event_type, full=False))[:HEADER_SIZE] for event_type in EVENT_TYPES}
PLAIN = {str: "string", int: "long", float: "double", bool: "boolean", bytes: "bytes"}


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_golden_bytes_decode_to_the_recorded_event(name: str) -> None:
    event = decode(bytes.fromhex(ENTRIES[name]["hex"]))
    assert type(event).__name__ == name.split(".", maxsplit=1)[0]
    recorded, decoded = ENTRIES[name]["event"], json.loads(msgspec.json.encode(event))
    assert {key: value for key, value in decoded.items() if key in recorded} == recorded


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_golden_bytes_of_the_present_schema_come_out_again(name: str) -> None:
    raw = bytes.fromhex(ENTRIES[name]["hex"])
    if raw[:HEADER_SIZE] in HEADERS_NOW:
        assert encode(decode(raw)) == raw


def test_every_released_schema_has_golden_bytes() -> None:
    released = {f"{event_type.__name__}.v{version}" for event_type, version, _ in released_schemas()}
    assert released == {name.rpartition(".")[0] for name in ENTRIES}
    assert set(golden_entries()) <= set(ENTRIES)


def _avro(hint: Any, node: Any, named: dict[str, Any]) -> bool:
    """Whether the Avro type `node` is that of the Python type `hint`, all the way down."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(node, str) and node in named:
        node = named[node]
    if origin in (types.UnionType, typing.Union):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return isinstance(node, list) and node[0] == "null" and _avro(inner, node[1], named)
    if origin is typing.Literal:
        return bool(node == "string")
    if origin is tuple:
        return node["type"] == "array" and _avro(arguments[0], node["items"], named)
    if origin is dict:
        return node["type"] == "map" and arguments[0] is str and _avro(arguments[1], node["values"], named)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return node["type"] == "record" and node["name"] == hint.__name__ and _fields_agree(hint, node, named)
    return bool((node["type"] if isinstance(node, dict) else node) == PLAIN[hint])


def _fields_agree(struct: type[Any], record: dict[str, Any], named: dict[str, Any]) -> bool:
    named[record["name"]] = record
    hints = typing.get_type_hints(struct)
    names = [field.name for field in msgspec.structs.fields(struct)]
    assert [field["name"] for field in record["fields"]] == names, struct
    for field in record["fields"]:
        assert _avro(hints[field["name"]], field["type"], named), (struct, field)
    return True


def test_class_and_newest_schema_agree_field_by_field() -> None:
    newest = {event_type: json.loads(text) for event_type, _, text in released_schemas()}
    assert set(newest) == set(EVENT_TYPES)
    for event_type, schema in newest.items():
        assert schema["name"] == event_type.__name__
        assert schema["namespace"] == "hoofprint.v1"
        assert _fields_agree(event_type, schema, {})


def test_a_field_with_a_default_has_the_same_default_in_the_schema() -> None:
    newest = {event_type: json.loads(text) for event_type, _, text in released_schemas()}
    for event_type, schema in newest.items():
        for field, avro in zip(msgspec.structs.fields(event_type), schema["fields"], strict=True):
            if field.name == "event_id":
                continue
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            if default is msgspec.NODEFAULT:
                # a nullable field without a default in the class may have null in the schema
                assert avro.get("default") is None, (event_type, field.name)
            else:
                assert avro["default"] == (list(default) if isinstance(default, tuple) else default)


def test_fingerprint_of_the_specifications_example() -> None:
    """Avro 1.11, "Schema Fingerprints": CRC-64-AVRO of `"int"` is 0x7275d51a3f395c8f; the header has it little-endian."""
    assert fingerprint('"int"', "CRC-64-AVRO") == "8f5c393f1ad57572"


def test_the_header_is_the_marker_and_the_fingerprint_of_the_canonical_form() -> None:
    raw = encode(example(ev.RunEnded, full=True))
    schema = {"name": "hoofprint.v1.RunEnded", "type": "record", "fields": [
        {"name": "event_id", "type": "string"}, {"name": "run_id", "type": "string"}, {"name": "kind", "type": "string"},
        {"name": "policy_id", "type": "string"}, {"name": "occurred_at", "type": "long"}, {"name": "reason", "type": "string"},
    ]}  # fmt: skip
    canonical = json.dumps(schema, separators=(",", ":"))
    assert raw[:HEADER_SIZE] == MAGIC + _crc64_avro(canonical.encode()).to_bytes(8, "little")


def _crc64_avro(data: bytes) -> int:
    """The bitwise algorithm of the specification."""
    empty = 0xC15D213AA4D7A795
    value = empty
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (empty if value & 1 else 0)
    return value


@pytest.mark.parametrize(
    "raw", [b"", b"\xc3", b"\xc3\x01" + bytes(8), b"{}", b"\x00\x00\x00\x00\x01abcdefgh"]
)
def test_an_unknown_header_is_an_unknown_event(raw: bytes) -> None:
    with pytest.raises(UnknownEvent) as caught:
        decode(raw)
    assert caught.value.detail["size"] == len(raw)


@pytest.mark.parametrize("event_type", EVENT_TYPES)
def test_a_body_cut_anywhere_is_incompatible(event_type: type[Event]) -> None:
    raw = encode(example(event_type, full=True))
    for size in range(HEADER_SIZE, len(raw)):
        with pytest.raises(IncompatibleEvent):
            decode(raw[:size])


@pytest.mark.parametrize("event_type", EVENT_TYPES)
def test_bytes_behind_the_end_are_incompatible(event_type: type[Event]) -> None:
    with pytest.raises(IncompatibleEvent) as caught:
        decode(encode(example(event_type, full=False)) + b"\x00")
    assert caught.value.detail["rest"] == 1


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(EVENT_TYPES), st.binary(max_size=60), st.data())
def test_damaged_bytes_decode_or_are_a_schema_error(
    event_type: type[Event], junk: bytes, data: st.DataObject
) -> None:
    raw = encode(example(event_type, full=True))
    at = data.draw(st.integers(HEADER_SIZE, len(raw)))
    damaged = raw[:at] + junk + raw[at + len(junk) :]
    with contextlib.suppress(SchemaError):
        assert type(decode(damaged)) is event_type


def test_a_value_outside_its_literal_is_incompatible() -> None:
    raw = encode(example(ev.RunEnded, full=True)).replace(b"\x08free", b"\x08fred")
    with pytest.raises(IncompatibleEvent):
        decode(raw)


@pytest.mark.parametrize("step", ["one", None, 2**63])
def test_a_field_that_does_not_fit_is_not_encoded(step: Any) -> None:
    with pytest.raises(IncompatibleEvent):
        encode(ev.BatchRequested(run_id="r", occurred_at=1, step=step, batch_id="b"))


def test_decode_as_names_what_it_found() -> None:
    raw = encode(example(ev.RunEnded, full=True))
    assert decode_as(raw, ev.RunEnded).run_id.startswith("run_id")
    with pytest.raises(IncompatibleEvent) as caught:
        decode_as(raw, ev.RunConfigured)
    assert caught.value.detail == {"expected": "RunConfigured", "found": "RunEnded"}


def test_the_same_fact_has_the_same_id_and_another_fact_another() -> None:
    fact = ev.GroupAdmitted(
        run_id="r",
        occurred_at=1,
        group_id="g",
        attempt=0,
        group_size=2,
        prompt_index=3,
        dataset_epoch=0,
        prompt_digest="d",
    )
    first = ev.identified(fact).event_id
    assert first == ev.identified(msgspec.structs.replace(fact, occurred_at=9, prompt_digest="e")).event_id
    for other in ({"attempt": 1}, {"group_id": "h"}, {"run_id": "s"}):
        assert ev.identified(msgspec.structs.replace(fact, **other)).event_id != first


@pytest.mark.parametrize("event_type", EVENT_TYPES)
def test_the_identity_names_fields_of_the_event(event_type: type[Event]) -> None:
    assert set(event_type.IDENTITY) <= {field.name for field in msgspec.structs.fields(event_type)}


@pytest.mark.parametrize("event_type", EVENT_TYPES)
def test_the_garbage_collector_never_looks_at_events(event_type: type[Event]) -> None:
    """Open groups hold hundreds of thousands of them; none can be part of a cycle."""
    event = example(event_type, full=True)
    assert not gc.is_tracked(event)
    for value in (getattr(event, field.name) for field in msgspec.structs.fields(event_type)):
        parts = value if isinstance(value, tuple) else (value,)
        assert not any(gc.is_tracked(part) for part in parts if isinstance(part, msgspec.Struct))
