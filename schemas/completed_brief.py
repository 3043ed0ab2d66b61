"""A GroupCompleted as the control fold needs it: the group, and of its trajectories the labels of their versions alone.

A start without a snapshot folds every group of the run, and nine tenths of reading one are facts that decide nothing there. They
are passed over by one regular expression made of the schema. It takes only what the whole reader takes (text is ASCII and at
most 64 long, numbers have at most 63 bits): a brief is given where the whole event could be, with the same labels, and in all
other cases the whole event is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, get_args

import msgspec

from schemas.avro_reader import READER_GIVES_UP, compile_reader
from schemas.codec import HEADER_SIZE, decode, decode_as, plain_schemas
from schemas.events import Event, GroupCompleted, Kind, PayloadRef, TrajectoryStatus

_SIZES = (
    32,
    64,
    *range(1, 32),
    *range(33, 64),
)  # of texts, in the order they are tried: ids and digests first
_NUMBER = rb"(?>[\x80-\xff]{0,8}[\x00-\x7f])"


class CompletedBrief(msgspec.Struct):
    """`labels`: as recorded, per trajectory in the order of the event. `raw`: the record that it stands for."""

    event_id: str
    run_id: str
    kind: Kind
    policy_id: str
    occurred_at: int
    group_id: str
    attempt: int
    payload: PayloadRef
    sequences: int
    trainable_tokens: int
    labels: tuple[str, ...] = ()
    raw: bytes = b""

    def whole(self) -> GroupCompleted:
        """All that the record says."""
        return decode_as(self.raw, GroupCompleted)


class _BriefReader(NamedTuple):
    """Of one released schema: what stands in front of the trajectories, and one of them."""

    front: Callable[[bytes, int], tuple[CompletedBrief, int]]
    trajectory: re.Pattern[bytes]


def decode_briefly(raw: bytes) -> Event | CompletedBrief:
    """The event in `raw`, a GroupCompleted briefly where that can be. Errors as of `decode`."""
    reader = _readers().get(raw[:HEADER_SIZE])
    brief = None if reader is None else _brief(reader, raw)
    return decode(raw) if brief is None else brief


def _brief(reader: _BriefReader, raw: bytes) -> CompletedBrief | None:
    try:
        brief, at = reader.front(raw, HEADER_SIZE)
        count = raw[at]
    except READER_GIVES_UP:
        return None
    stop = len(raw) - 1
    found = reader.trajectory.findall(raw, at + 1, stop)
    if raw[stop] or not found or count & 129 or len(found) != count >> 1:
        return None
    wholes, labels = zip(*found, strict=True)
    if sum(map(len, wholes)) != stop - at - 1:
        return None  # something between two of them that is none
    if labels.count(labels[0]) == len(labels):  # most groups are of one version
        brief.labels = (labels[0][1:].decode(),) * len(labels)
    else:
        brief.labels = tuple([label[1:].decode() for label in labels])
    brief.raw = raw
    return brief


@cache
def _readers() -> dict[bytes, _BriefReader]:
    found = {}
    for header, schema in plain_schemas(GroupCompleted):
        names = [field["name"] for field in schema["fields"]]
        if names[-1] != "trajectories":
            continue  # a version that goes on behind them is read whole
        front = {**schema, "fields": schema["fields"][:-1]}
        item = schema["fields"][-1]["type"]["items"]
        found[header] = _BriefReader(
            compile_reader(front, CompletedBrief, whole=False), _trajectory_pattern(item)
        )
    return found


def _trajectory_pattern(schema: Any) -> re.Pattern[bytes]:
    """One record; its groups are the whole of it and its version with the length in front."""
    parts = []
    for field in schema["fields"]:
        match field["name"]:
            case "version":
                parts.append(b"(" + _text() + b")")
            case "parent_traj_id":
                parts.append(
                    _text(empty=False)
                )  # one without an id has no say, whatever its version: that is for the fold
            case "status":
                parts.append(_one_of(TrajectoryStatus))
            case _:
                parts.append(_pattern(field["type"]))
    return re.compile(b"(" + b"".join(parts) + b")", re.DOTALL)


def _pattern(schema: Any) -> bytes:
    """What any value of the type looks like, if it is of the usual size."""
    if isinstance(schema, list):
        return rb"(?>\x00|\x02" + _pattern(schema[1]) + b")"
    match schema["type"] if isinstance(schema, dict) else schema:
        case "string":
            return _text()
        case "long":
            return _NUMBER
        case "double":
            return b".{8}"
        case "array":
            item = _pattern(schema["items"])
            return rb"(?>\x00|\x02" + item + rb"\x00|\x04" + item * 2 + rb"\x00|\x06" + item * 3 + rb"\x00)"
        case other:
            raise NotImplementedError(f"no pattern of {other}")


def _text(*, empty: bool = True) -> bytes:
    sized = [_size(size) + rb"[\x00-\x7f]{%d}" % size for size in _SIZES]
    return b"(?>" + b"|".join([rb"\x00", *sized] if empty else sized) + b")"


def _one_of(choice: Any) -> bytes:
    texts = [str(text).encode() for text in get_args(choice)]
    return b"(?>" + b"|".join(_size(len(text)) + re.escape(text) for text in texts) + b")"


def _size(size: int) -> bytes:
    """A length as it stands in front of a text."""
    raw = size << 1
    return re.escape(bytes([raw]) if raw < 128 else bytes([raw & 127 | 128, raw >> 7]))
