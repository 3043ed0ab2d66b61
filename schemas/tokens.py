"""Token columns as bytes: little-endian int32 ids and float32 log-probs, without copies where the layout allows it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from schemas.errors import CorruptPayload

ID_TYPE = np.dtype("<i4")
LOGPROB_TYPE = np.dtype("<f4")


def pack_ids(ids: Iterable[int]) -> bytes:
    """int32 little-endian."""
    return np.fromiter(ids, dtype=ID_TYPE).tobytes()


def pack_logprobs(values: Iterable[float]) -> bytes:
    """float32 little-endian."""
    return np.fromiter(values, dtype=LOGPROB_TYPE).tobytes()


def ids_of(raw: bytes) -> NDArray[np.int32]:
    """[T] view on the bytes."""
    if len(raw) % 4:
        raise CorruptPayload("token bytes are not a multiple of 4", size=len(raw))
    return np.frombuffer(raw, dtype=ID_TYPE)


def logprobs_of(raw: bytes) -> NDArray[np.float32]:
    """[T] view on the bytes."""
    if len(raw) % 4:
        raise CorruptPayload("log-prob bytes are not a multiple of 4", size=len(raw))
    return np.frombuffer(raw, dtype=LOGPROB_TYPE)
