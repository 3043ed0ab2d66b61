"""Arrow schemas: the payload file of a group, the columns of a large segment, and the archive's tables.

A payload file is an Arrow IPC file with one row per sequence (= lineage). Lists of one row have equal lengths: one entry
per token of the sequence, context and output. `version_code` indexes the row's `versions`; -1 where the token has none
(context, or an unreal version). Rows are sorted by (sample_index, first segment).
"""

from __future__ import annotations

import pyarrow as pa

GROUP_PAYLOAD_CODEC = "group-arrow-v1"
SEGMENT_COLUMNS_CODEC = "segment-columns-v1"
EXPERTS_CODEC = "experts-v1"
REQUEST_CODEC = "request-json-v1"

GROUP_PAYLOAD = pa.schema(
    [
        pa.field("parent_traj_id", pa.string(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("lineage_id", pa.string(), nullable=False),
        pa.field("is_anchor", pa.bool_(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("trajectory_version", pa.string(), nullable=False),
        pa.field("versions", pa.list_(pa.string()), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("version_code", pa.list_(pa.int32()), nullable=False),
        pa.field("segment_indices", pa.list_(pa.int32()), nullable=False),
        pa.field("experts_uri", pa.list_(pa.string()), nullable=False),
    ]
)

SEGMENT_COLUMNS = pa.schema(
    [
        pa.field("context_ids", pa.binary(), nullable=False),
        pa.field("output_ids", pa.binary(), nullable=False),
        pa.field("output_logprobs", pa.binary(), nullable=False),
    ]
)
