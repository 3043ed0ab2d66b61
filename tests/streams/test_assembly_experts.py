"""Routed experts reach the payload: one reference per segment of a sequence, inherited ones included."""

from __future__ import annotations

from pathlib import Path

import msgspec
from assembler_runs import completed, feed, fresh
from assembler_sessions import Session

from journal.payloads import PayloadStore
from schemas.arrow import EXPERTS_CODEC, GROUP_PAYLOAD_CODEC
from schemas.events import PayloadRef, TokenSegment
from streams.group_payload import group_payload


def routed(segment: TokenSegment) -> TokenSegment:
    name = f"run/g/0/experts-{segment.segment_index}"
    return msgspec.structs.replace(segment, experts=PayloadRef(name, "x", 1, EXPERTS_CODEC))


def test_every_sequence_names_the_experts_of_its_segments(tmp_path: Path) -> None:
    s = Session()
    events = [
        routed(s.segment(0, [1], [2, 3])),
        s.segment(1, [4], [5], parent=0),  # its engine could not say
        routed(s.segment(2, [6], [7], parent=0, branch=3, lineage="branch")),
        s.end(3),
    ]
    done = completed(feed(fresh(1), events))
    store = PayloadStore(str(tmp_path))
    ref = store.put("run", "g", 0, group_payload(done.sequences), GROUP_PAYLOAD_CODEC)
    listed = store.open_arrow(ref)["experts_uri"].to_pylist()
    assert listed == [
        ["run/g/0/experts-0", None],
        ["run/g/0/experts-0", "run/g/0/experts-2"],
    ]
