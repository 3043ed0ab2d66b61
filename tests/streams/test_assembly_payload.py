"""The payload file of a group: what goes in comes out, from equal groups equal bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from assembler_runs import completed, feed, flat, fresh
from assembler_sessions import Session, group

from journal.payloads import PayloadStore
from schemas.arrow import GROUP_PAYLOAD, GROUP_PAYLOAD_CODEC
from schemas.events import PayloadRef
from streams.assembly import completion
from streams.group_payload import group_payload


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def test_every_column_of_every_row_comes_back(tmp_path: Path) -> None:
    session = Session()
    done = completed(
        feed(
            fresh(1),
            [
                session.segment(0, [1], [2, 3], version="a"),
                session.segment(1, [4], [5], version="b", parent=0, branch=2, lineage="other"),
                session.end(2, reward=0.5),
            ],
        )
    )
    store = PayloadStore(str(tmp_path))
    ref = store.put("run", "g", 0, group_payload(done.sequences), GROUP_PAYLOAD_CODEC)
    table = store.open_arrow(ref)
    assert table.schema == GROUP_PAYLOAD
    for row, sequence in zip(table.to_pylist(), done.sequences, strict=True):
        for name, value in sequence._asdict().items():
            assert row[name] == (value.tolist() if isinstance(value, np.ndarray) else _listed(value))
    for name in ("tokens", "loss_mask", "logprobs", "version_code"):
        assert pc.list_value_length(table[name]).to_pylist() == [3, 4]


def test_the_event_says_what_the_file_holds() -> None:
    done = completed(feed(fresh(2), flat(group(size=2))))
    ref = PayloadRef("run/g/0/x", "x", 1, GROUP_PAYLOAD_CODEC)
    event = completion(done, ref)
    assert (event.sequences, event.trainable_tokens, event.payload) == (2, 8, ref)
    assert [facts.sequences for facts in event.trajectories] == [1, 1]
    assert event == completion(done, ref)
