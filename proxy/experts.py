"""Routed experts: which experts every position went to, merged over the engine calls of a turn and narrowed. Pure.

An engine gives, per call, one row of `layers * top_k` numbers for each position but the last sampled token, which was never
run. Calls of a resumed generation overlap, and the rows of what an earlier call produced are those of the weights that
produced it: of each call the rows `[0 if first else prefix - 1, prefix + output - 1)` count. A segment stores what it adds to its
lineage: from the row before its context (from 0 for a lineage's first) to the row before its last token; so the rows of a
lineage's segments, one behind the other, are the lineage's. Invariants: any cuts of a generation give the same rows; a
row that no engine gave is the dtype's greatest number, never expert 0; a number that does not fit is an error, never a wrap.
"""

from __future__ import annotations

import binascii
import io
from base64 import b64decode
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.errors import CorruptPayload

Rows = NDArray[np.unsignedinteger[Any]]
_NARROW: tuple[type[np.unsignedinteger[Any]], ...] = (np.uint8, np.uint16)


class ExpertCall(NamedTuple):
    """One engine call: `prefix` tokens in, `output` tokens out; `data`: SGLang's base64 of the rows from `start` on, if any."""

    prefix: int
    output: int
    start: int
    data: str | None


def first_row(kept: int) -> int:
    """The first row that a segment behind `kept` tokens of its lineage stores."""
    return max(0, kept - 1)


def merge(calls: Sequence[ExpertCall], kept: int) -> Rows | None:
    """[rows of the segment, width] of a turn's calls in order; None if no call has rows. CorruptPayload."""
    fruitful = [call for call in calls if call.output]  # without a token, nothing was sampled with its routes
    if not any(call.data is not None for call in fruitful):
        return None
    begin = first_row(kept)
    blocks: list[NDArray[np.int32] | int] = []
    for index, call in enumerate(fruitful):
        low = begin if index == 0 else call.prefix - 1
        high = call.prefix + call.output - 1
        blocks.append(high - low if call.data is None else _rows(call, low, high))
    return _narrowed(blocks)


def _rows(call: ExpertCall, low: int, high: int) -> NDArray[np.int32]:
    """Rows [low, high) of a call, in positions of the whole context."""
    try:
        flat = np.frombuffer(b64decode(call.data or "", validate=True), "<i4")
    except (binascii.Error, ValueError) as broken:
        raise CorruptPayload("routed experts are not base64 of 32-bit numbers") from broken
    count = high - call.start
    if count <= 0 or low < call.start or len(flat) % count or not len(flat):
        raise CorruptPayload(
            "routed experts do not fit the tokens", numbers=len(flat), rows=count, first=call.start
        )
    return flat.reshape(count, -1)[low - call.start :]


def _narrowed(blocks: Iterable[NDArray[np.int32] | int]) -> Rows:
    """Blocks of rows, or counts of absent rows, as one array."""
    blocks = list(blocks)
    known = [block for block in blocks if not isinstance(block, int)]
    widths = {block.shape[1] for block in known}
    if len(widths) != 1:
        raise CorruptPayload(
            "routed experts of one turn have rows of different widths", widths=sorted(widths)
        )
    width, dtype = widths.pop(), narrowest(np.concatenate(known))
    parts = [
        np.full((block, width), np.iinfo(dtype).max, dtype)
        if isinstance(block, int)
        else narrowed(block, dtype)
        for block in blocks
    ]
    return np.concatenate(parts)


def narrowest(numbers: NDArray[np.int32]) -> type[np.unsignedinteger[Any]]:
    """The smallest type that holds them beside its sentinel. CorruptPayload: none does."""
    most = int(numbers.max(initial=0))
    for dtype in _NARROW:
        if most < np.iinfo(dtype).max:
            return dtype
    raise CorruptPayload("an expert's number does not fit", number=most)


def narrowed(numbers: NDArray[np.int32], dtype: type[np.unsignedinteger[Any]]) -> Rows:
    """The same numbers; CorruptPayload where one is negative, or not below the sentinel."""
    least, most = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    if least < 0 or most >= np.iinfo(dtype).max:
        raise CorruptPayload("an expert's number does not fit", number=least if least < 0 else most)
    return numbers.astype(dtype)


def absent(rows: Rows) -> NDArray[np.bool_]:
    """[rows]: which rows no engine gave."""
    sentinel: NDArray[np.bool_] = rows == np.iinfo(rows.dtype).max
    return np.asarray(sentinel.all(axis=1))


def pack_experts(rows: Rows) -> bytes:
    """Codec `experts-v1`: npy, whose header has shape and dtype."""
    sink = io.BytesIO()
    np.save(sink, rows, allow_pickle=False)
    return sink.getvalue()


def unpack_experts(data: bytes) -> Rows:
    """What `pack_experts` got. CorruptPayload."""
    try:
        rows = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as broken:
        raise CorruptPayload("routed experts are not npy") from broken
    if rows.ndim != 2 or rows.dtype not in _NARROW:
        raise CorruptPayload("routed experts are not rows of narrow numbers", dtype=str(rows.dtype))
    return np.asarray(rows)
