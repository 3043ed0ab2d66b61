"""Typed columns of the archive, derived from the event classes: one table per topic holds the union of its events' fields.

Every field of every event becomes a nullable column of the same name, so that a new field needs no work here. Three
things are more than a translation of types: token arrays (bytes on the wire) become lists that SQL can unnest, integer
times become timestamps, and fields of `DeadLetter` that the record's own columns would hide are renamed. Invariant:
within one topic a column name has one type; events that disagree are refused when the module is used, not in SQL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import inspect

from schemas.errors import ConfigError
from schemas.events import DeadLetter, Event
from schemas.topics import Topic

TIME = pa.timestamp("us", tz="UTC")
IDS = pa.list_(pa.field("element", pa.int32()))
LOGPROBS = pa.list_(pa.field("element", pa.float32()))

RECORD_COLUMNS = (
    ("partition", pa.int32()),
    ("kafka_offset", pa.int64()),
    ("kafka_timestamp", TIME),
    ("key", pa.binary()),
    ("event_type", pa.string()),
    ("raw", pa.binary()),
)
TOKEN_LISTS: dict[str, tuple[pa.DataType, np.dtype[Any]]] = {
    "context_ids": (IDS, np.dtype("<i4")),
    "output_ids": (IDS, np.dtype("<i4")),
    "lag": (IDS, np.dtype("<i4")),
    "output_logprobs": (LOGPROBS, np.dtype("<f4")),
    "trainer_logprobs": (LOGPROBS, np.dtype("<f4")),
    "rollout_logprobs": (LOGPROBS, np.dtype("<f4")),
}
RENAMED: dict[tuple[str, str], str] = {
    (DeadLetter.__name__, name): f"source_{name}" for name in ("topic", "partition", "offset", "key", "raw")
}


class RawRow(msgspec.Struct, frozen=True):
    """One record as it is archived. `event` is None where the bytes do not decode."""

    partition: int
    kafka_offset: int
    timestamp_ms: int
    key: bytes | None
    raw: bytes
    event: Event | None


def column_name(event_type: type[Event], field: str) -> str:
    """Column that holds a field of an event."""
    return RENAMED.get((event_type.__name__, field), field)


def is_token_list(event_type: type[Event], field: str) -> bool:
    """Whether the field is a token array; only `bytes` fields are (a `LagDrift.lag` is a number)."""
    return field in TOKEN_LISTS and _field_types(event_type)[field] == pa.binary()


@cache
def event_columns(event_type: type[Event]) -> dict[str, pa.DataType]:
    """Column name to type of one event's fields, in the order of the class."""
    return {
        column_name(event_type, name): TOKEN_LISTS[name][0] if is_token_list(event_type, name) else kind
        for name, kind in _field_types(event_type).items()
    }


@cache
def topic_schema(topic: Topic) -> pa.Schema:
    """Columns of a topic's table: the record's own, then the union of its events' columns. Raises ConfigError on a clash."""
    columns: dict[str, pa.DataType] = dict(RECORD_COLUMNS)
    for event_type in topic.events:
        for name, kind in event_columns(event_type).items():
            if columns.setdefault(name, kind) != kind or name in dict(RECORD_COLUMNS):
                raise ConfigError(
                    f"column {name} of {topic.name} has two types",
                    topic=topic.name, event=event_type.__name__, column=name, types=[str(columns[name]), str(kind)],
                )  # fmt: skip
    return pa.schema([pa.field(name, kind, nullable=True) for name, kind in columns.items()])


def to_table(topic: Topic, rows: Sequence[RawRow]) -> pa.Table:
    """[len(rows)] table of a topic with all its columns; column-wise, so that the cost per row is a dict look-up."""
    facts = [{} if row.event is None else _facts(row.event) for row in rows]
    own: dict[str, Iterable[Any]] = {
        "partition": [row.partition for row in rows],
        "kafka_offset": [row.kafka_offset for row in rows],
        "kafka_timestamp": [row.timestamp_ms * 1000 for row in rows],
        "key": [row.key for row in rows],
        "event_type": [None if row.event is None else type(row.event).__name__ for row in rows],
        "raw": [row.raw for row in rows],
    }
    schema = topic_schema(topic)
    arrays = [
        pa.array(own[field.name], field.type)
        if field.name in own
        else _column(field.type, [fact.get(field.name) for fact in facts])
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _facts(event: Event) -> dict[str, Any]:
    """Column values of an event; maps as pairs, which is how Arrow takes them."""
    plain: dict[str, Any] = msgspec.to_builtins(event, builtin_types=(bytes,))
    for (event_name, field), column in RENAMED.items():
        if event_name == type(event).__name__:
            plain[column] = plain.pop(field)
    return plain


def _column(kind: pa.DataType, values: list[Any]) -> pa.Array:
    if all(value is None for value in values):
        return pa.nulls(len(values), kind)
    if kind in (IDS, LOGPROBS):
        return _token_lists(kind, values)
    return pa.array([_pairs(kind, value) for value in values] if _has_map(kind) else values, kind)


def _token_lists(kind: pa.DataType, values: list[bytes | None]) -> pa.Array:
    """Lists over one concatenation of the bytes: no Python object per token."""
    width = 4
    sizes = [0 if value is None else len(value) // width for value in values]
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    # bytes behind the last whole token would shift all rows that follow; they stay visible in `raw`
    joined = b"".join(value[: size * width] for value, size in zip(values, sizes, strict=True) if value)
    flat = np.frombuffer(joined, dtype="<i4" if kind == IDS else "<f4")
    mask = pa.array([value is None for value in values])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), type=kind, mask=mask)


def _has_map(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_has_map(field.type) for field in kind)
    return bool(pa.types.is_map(kind) or (pa.types.is_list(kind) and _has_map(kind.value_type)))


def _pairs(kind: pa.DataType, value: Any) -> Any:
    if value is None:
        return None
    if pa.types.is_map(kind):
        return list(value.items())
    if pa.types.is_struct(kind):
        return {field.name: _pairs(field.type, value.get(field.name)) for field in kind}
    return [_pairs(kind.value_type, item) for item in value] if pa.types.is_list(kind) else value


@cache
def _field_types(event_type: type[msgspec.Struct]) -> dict[str, pa.DataType]:
    info = inspect.type_info(event_type)
    assert isinstance(info, inspect.StructType)
    return {field.name: _arrow_type(field.name, field.type) for field in info.fields}


_PLAIN: Mapping[type[inspect.Type], Callable[[], pa.DataType]] = {
    inspect.StrType: pa.string,
    inspect.LiteralType: pa.string,
    inspect.BytesType: pa.binary,
    inspect.BoolType: pa.bool_,
    inspect.FloatType: pa.float64,
}


def _arrow_type(name: str, kind: inspect.Type) -> pa.DataType:
    """Arrow type of a field: our own annotations only use these forms; another one is refused."""
    if isinstance(kind, inspect.UnionType):
        (kind,) = (one for one in kind.types if not isinstance(one, inspect.NoneType))
    if isinstance(kind, inspect.IntType):
        return TIME if name.endswith("_at") else pa.int64()
    if isinstance(kind, inspect.VarTupleType | inspect.ListType):
        return pa.list_(pa.field("element", _arrow_type(name, kind.item_type)))
    if isinstance(kind, inspect.DictType):
        return pa.map_(_arrow_type(name, kind.key_type), _arrow_type(name, kind.value_type))
    if isinstance(kind, inspect.StructType):
        return pa.struct([pa.field(field.name, _arrow_type(field.name, field.type)) for field in kind.fields])
    if type(kind) in _PLAIN:
        return _PLAIN[type(kind)]()
    raise ConfigError(f"no column type for field {name}", field=name, type=str(kind))
