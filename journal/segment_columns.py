"""The token columns of a large segment, back from the payload store into its event. Pure but for the `open_arrow` it is given."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pyarrow as pa

from schemas.arrow import SEGMENT_COLUMNS
from schemas.errors import CorruptPayload
from schemas.events import PayloadRef, TokenSegment


def with_columns(segment: TokenSegment, open_arrow: Callable[[PayloadRef], pa.Table]) -> TokenSegment:
    """The segment with its columns inline. CorruptPayload: the file is not the columns of one segment."""
    ref = segment.tokens_ref
    if ref is None:
        return segment
    table, names = open_arrow(ref), SEGMENT_COLUMNS.names
    if table.num_rows != 1 or not set(names) <= set(table.column_names):
        raise CorruptPayload(f"{ref.uri} is not the columns of one segment", uri=ref.uri)
    return msgspec.structs.replace(segment, **{name: table.column(name)[0].as_py() for name in names})
