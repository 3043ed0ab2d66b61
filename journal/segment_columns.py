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
    columns = {name: table.column(name) for name in names if name in table.column_names}
    fits = all(
        column.type == SEGMENT_COLUMNS.field(name).type and not column.null_count
        for name, column in columns.items()
    )
    if table.num_rows != 1 or len(columns) < len(names) or not fits:
        raise CorruptPayload(f"{ref.uri} is not the columns of one segment", uri=ref.uri)
    return msgspec.structs.replace(segment, **{name: column[0].as_py() for name, column in columns.items()})
