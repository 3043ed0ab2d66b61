"""A complete group as one Arrow file (`schemas.arrow.GROUP_PAYLOAD`): one row per sequence, built from raw buffers.

Equal groups give equal bytes, so the file's place in the store (its digest) is deterministic, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.arrow import GROUP_PAYLOAD
from streams.assembly_lineages import TokenSequence


def group_payload(rows: Sequence[TokenSequence]) -> memoryview:
    """The file's bytes; rows in the order given: by sample index, then by the lineage's first segment."""
    columns = [
        pa.array([row.parent_traj_id for row in rows], pa.string()),
        pa.array([row.sample_index for row in rows], pa.int32()),
        pa.array([row.lineage_id for row in rows], pa.string()),
        pa.array([row.is_anchor for row in rows], pa.bool_()),
        pa.array([row.status for row in rows], pa.string()),
        pa.array([row.reward for row in rows], pa.float64()),
        pa.array([row.trajectory_version for row in rows], pa.string()),
        pa.array([row.versions for row in rows], pa.list_(pa.string())),
        _lists([row.tokens for row in rows], pa.int32()),
        _lists([row.loss_mask for row in rows], pa.uint8()),
        _lists([row.logprobs for row in rows], pa.float32()),
        _lists([row.version_code for row in rows], pa.int32()),
        pa.array([row.segment_indices for row in rows], pa.list_(pa.int32())),
        pa.array([row.experts_uri for row in rows], pa.list_(pa.string())),
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, GROUP_PAYLOAD) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=GROUP_PAYLOAD))
    return memoryview(sink.getvalue())


def _lists(arrays: Sequence[NDArray[np.generic]], item: pa.DataType) -> pa.ListArray:
    """One list per array, without a Python object per token."""
    ends = np.zeros(len(arrays) + 1, np.int32)
    np.cumsum([array.size for array in arrays], out=ends[1:])
    values = np.concatenate(arrays) if arrays else np.empty(0)
    flat = pa.Array.from_buffers(item, int(ends[-1]), [None, pa.py_buffer(np.ascontiguousarray(values))])
    return pa.ListArray.from_buffers(pa.list_(item), len(arrays), [None, pa.py_buffer(ends)], children=[flat])
