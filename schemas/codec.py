"""Avro single-object encoding of events: `C3 01`, the 8-byte CRC-64-AVRO fingerprint of the schema, the body.

Self-identifying and without a server. A reader knows every released schema by its fingerprint; `schemas/avro/` holds one
file per event version. Logical types are documentation here: times stay integers on both sides.

fastavro is the reference. Events of the usual form are read and written by functions compiled from the same schemas
(`avro_reader`, `avro_writer`), which give the same bytes and the same events in a third to two thirds of the time; what
those give up on, the reference decides.
"""

from __future__ import annotations

import io
import json
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, TypeVar

import fastavro
import msgspec
from fastavro.schema import fingerprint, to_parsing_canonical_form

from schemas.avro_reader import READER_GIVES_UP, Reader, compile_reader
from schemas.avro_writer import WRITER_GIVES_UP, Writer, compile_writer
from schemas.errors import IncompatibleEvent, UnknownEvent
from schemas.events import EVENT_TYPES, Event

MAGIC = b"\xc3\x01"
HEADER_SIZE = len(MAGIC) + 8
E = TypeVar("E", bound=Event)


class _Coder:
    """One released schema: its parsed form, fingerprint and event class."""

    def __init__(self, event_type: type[Event], text: str) -> None:
        raw = json.loads(text)
        crc = fingerprint(to_parsing_canonical_form(fastavro.parse_schema(raw)), "CRC-64-AVRO")
        # fastavro prints the checksum's bytes as they stand in the single-object header (little-endian)
        self.header = MAGIC + bytes.fromhex(crc)
        self.plain = _without_logical_types(raw)
        self.schema = fastavro.parse_schema(self.plain)
        self.event_type = event_type

    @cached_property
    def read(self) -> Reader:
        """Compiled when it is first needed: a process meets few of the schemas."""
        return compile_reader(self.plain, self.event_type)

    @cached_property
    def write(self) -> Writer:
        """As `read`."""
        return compile_writer(self.plain, self.header)


def _without_logical_types(node: Any) -> Any:
    """fastavro would turn timestamps into datetime objects, at several times the cost of the event itself."""
    if isinstance(node, dict):
        return {k: _without_logical_types(v) for k, v in node.items() if k != "logicalType"}
    return [_without_logical_types(v) for v in node] if isinstance(node, list) else node


@cache
def _coders() -> tuple[dict[type[Event], _Coder], dict[bytes, _Coder]]:
    """Coder of the newest version of each event, and of every version by its header."""
    by_type: dict[type[Event], _Coder] = {}
    by_header: dict[bytes, _Coder] = {}
    for event_type, _version, text in released_schemas():
        coder = _Coder(event_type, text)
        by_header[coder.header] = coder
        by_type[event_type] = coder
    return by_type, by_header


def released_schemas() -> list[tuple[type[Event], int, str]]:
    """Event class, version and text of every file in `schemas/avro`, oldest version first."""
    names = {event_type.__name__: event_type for event_type in EVENT_TYPES}
    found = []
    for entry in files("schemas").joinpath("avro").iterdir():
        name, dot, rest = entry.name.partition(".v")
        if dot and rest.endswith(".avsc"):
            found.append((names[name], int(rest.removesuffix(".avsc")), entry.read_text(encoding="utf-8")))
    return sorted(found, key=lambda schema: (schema[0].__name__, schema[1]))


def headers_of(event_type: type[Event]) -> tuple[bytes, ...]:
    """How records of an event begin, in every released version: to tell them apart without decoding."""
    return tuple(header for header, coder in _coders()[1].items() if coder.event_type is event_type)


def plain_schemas(event_type: type[Event]) -> list[tuple[bytes, Any]]:
    """Header and JSON, without logical types, of every released schema of an event."""
    return [(header, c.plain) for header, c in _coders()[1].items() if c.event_type is event_type]


def encode(event: Event) -> bytes:
    """Header and body of an event. Raises IncompatibleEvent when a field does not fit its schema."""
    try:
        return _coders()[0][type(event)].write(event)
    except WRITER_GIVES_UP:
        return encode_by_reference(event)


def decode(raw: bytes) -> Event:
    """The event in `raw`. Raises UnknownEvent (not our framing or schema) or IncompatibleEvent (broken body)."""
    coder = _coders()[1].get(raw[:HEADER_SIZE])
    if coder is None:
        raise UnknownEvent(
            "no schema has this fingerprint", header=bytes(raw[:HEADER_SIZE]).hex(), size=len(raw)
        )
    try:
        event: Event = coder.read(raw, HEADER_SIZE)
    except READER_GIVES_UP:
        return decode_by_reference(raw)
    return event


def encode_by_reference(event: Event) -> bytes:
    """What `encode` gives, by fastavro."""
    coder = _coders()[0][type(event)]
    out = io.BytesIO()
    out.write(coder.header)
    try:
        fastavro.schemaless_writer(out, coder.schema, msgspec.to_builtins(event, builtin_types=(bytes,)))
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as wrong:
        raise IncompatibleEvent(
            f"{type(event).__name__} does not fit its schema: {wrong}", event=type(event).__name__
        ) from wrong
    return out.getvalue()


def decode_by_reference(raw: bytes) -> Event:
    """What `decode` gives for a header that is known, by fastavro and msgspec."""
    coder = _coders()[1][raw[:HEADER_SIZE]]
    stream = io.BytesIO(raw)
    stream.seek(HEADER_SIZE)
    name = coder.event_type.__name__
    try:
        record = fastavro.schemaless_reader(stream, coder.schema, None)
        rest = len(raw) - stream.tell()
        if rest:
            raise IncompatibleEvent(f"{name} has bytes behind its end", event=name, rest=rest)
        return msgspec.convert(record, coder.event_type, builtin_types=(bytes,))
    except (
        EOFError,
        IndexError,
        ValueError,
        TypeError,
        OverflowError,
        MemoryError,
    ) as wrong:  # msgspec's error is a ValueError
        raise IncompatibleEvent(f"{name} does not decode: {wrong}", event=name, size=len(raw)) from wrong


def decode_as(raw: bytes, event_type: type[E]) -> E:
    """The event in `raw`, which must be of this class."""
    event = decode(raw)
    if not isinstance(event, event_type):
        raise IncompatibleEvent(
            f"expected {event_type.__name__}, found {type(event).__name__}",
            expected=event_type.__name__,
            found=type(event).__name__,
        )
    return event
