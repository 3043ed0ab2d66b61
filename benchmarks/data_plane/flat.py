"""Whether a trajectory costs the same with 1 and 8 partitions, and with 1,000 and 10,000 open groups.

Open groups are measured in the assembler itself, without a broker: what a record costs while so many groups wait for their last
trajectory. Partitions are measured end to end, as the CPU of the assembler and of all processes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.data_plane.workload import GROUP, RUN, Shape, group_ids, trajectories
from journal.clock import system_clock
from journal.payloads import PayloadStore
from journal.producer import AckProducer, OnOutcome, Position
from schemas import events as ev
from schemas.codec import encode
from streams.assembler_worker import AssemblerWorker
from streams.assembly import AssemblyRules
from streams.assembly_closed import ClosedAttempts

CHUNK = 128
PROBE = 128  # groups that are completed while the others stay open
COMMIT_EVERY = 1000  # records between two questions for the mark: Faust commits once a second


class _Acknowledged:
    """Stands for the producer: everything is acknowledged at once."""

    def post(self, event: ev.Event, on_outcome: OnOutcome) -> None:
        """At position 0."""
        encode(event)
        on_outcome(Position(0, 0))


def open_groups_ms(directory: Path, open_groups: int) -> float:
    """CPU-ms per trajectory of groups that complete while `open_groups` others are open; short tokens, so that state counts."""
    worker = AssemblerWorker(
        AssemblyRules(RUN, GROUP, 10**15, 0), ClosedAttempts(), PayloadStore(str(directory)),
        cast(AckProducer, _Acknowledged()), system_clock, _raise,
    )  # fmt: skip
    shape = Shape(tokens=64)
    offset = 0
    for name in group_ids(0, open_groups):
        sessions = trajectories(shape, [name])[: GROUP - 1]
        worker.handle(0, _records([session[0] for session in sessions], offset))
        offset += GROUP
    probe = [session[0] for session in trajectories(shape, group_ids(open_groups, PROBE))]
    records = _records(probe, offset)
    began = time.process_time()
    for start in range(0, len(records), CHUNK):
        worker.handle(0, records[start : start + CHUNK])
        if start % COMMIT_EVERY < CHUNK:
            worker.low_water(0)
            worker.tick(lambda _partition, _offset: True)
    took = time.process_time() - began
    assert worker.open_groups == open_groups
    return took / len(probe) * 1000


def _records(events: Sequence[ev.Event], start: int) -> list[Any]:
    return [
        SimpleNamespace(offset=offset, timestamp=0, key=b"", value=encode(event), headers=())
        for offset, event in enumerate(events, start)
    ]


def _raise(error: Exception) -> None:
    raise error
