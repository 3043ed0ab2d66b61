"""Whether a trajectory costs the same with 1,000 and 10,000 open groups, and whether memory follows what is open.

Both are measured in the assembler itself, without a broker, in its steady state: while so many groups are open, every group that
begins lets the oldest one complete. That keeps what garbage collection costs in proportion; a burst of groups between two
collections would measure its luck.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections import deque
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
PROBE = 512  # groups that begin, and complete, per measurement
LOOK_EVERY = 1024  # records between two questions for the mark: Faust commits once a second
SHAPE = Shape(tokens=64)  # short tokens, so that state counts


class _Acknowledged:
    """Stands for the producer: everything is acknowledged at once."""

    def post(self, event: ev.Event, on_outcome: OnOutcome) -> None:
        """At position 0."""
        encode(event)
        on_outcome(Position(0, 0))


class SteadyAssembler:
    """An assembler with so many open groups, each waiting for its last trajectory."""

    def __init__(self, directory: Path, open_groups: int) -> None:
        self._worker = AssemblerWorker(
            AssemblyRules(RUN, GROUP, 10**15, 0), ClosedAttempts(RUN), PayloadStore(str(directory)),
            cast(AckProducer, _Acknowledged()), system_clock, _raise,
        )  # fmt: skip
        self._begun = self._records = 0
        self._open = open_groups
        self._last: deque[bytes] = deque()
        while self._begun < open_groups:
            self.cpu_ms(min(PROBE, open_groups - self._begun))

    def cpu_ms(self, groups: int = PROBE) -> float:
        """CPU-ms per trajectory while so many groups begin and, once enough are open, as many complete."""
        records = self._next(groups)
        began = time.process_time()
        for start in range(0, len(records), CHUNK):
            self._worker.handle(0, records[start : start + CHUNK])
            if start % LOOK_EVERY == 0:
                self._worker.low_water(0)
                self._worker.tick(lambda _partition, _offset: True)
        took = time.process_time() - began
        assert self._worker.open_groups == min(self._begun, self._open)
        return took / (groups * GROUP) * 1000

    def _next(self, groups: int) -> list[Any]:
        values: list[bytes] = []
        for name in group_ids(self._begun, groups):
            sessions = [encode(session[0]) for session in trajectories(SHAPE, [name])]
            values += sessions[:-1]
            self._last.append(sessions[-1])
            self._begun += 1
            if self._begun > self._open:
                values.append(self._last.popleft())
        start, self._records = self._records, self._records + len(values)
        return [
            SimpleNamespace(offset=offset, timestamp=0, key=b"", value=value, headers=())
            for offset, value in enumerate(values, start)
        ]


def open_groups_ms(directory: Path, rounds: int) -> list[tuple[float, float]]:
    """CPU-ms per trajectory with 1,000 and with 10,000 open groups, measured in turns."""
    few, many = SteadyAssembler(directory / "few", 1_000), SteadyAssembler(directory / "many", 10_000)
    return [(few.cpu_ms(), many.cpu_ms()) for _ in range(rounds)]


def resident_mib(directory: Path, groups: int) -> float:
    """Of a process of its own behind so many groups, 256 of them open."""
    command = [sys.executable, "-m", "benchmarks.data_plane.flat", str(directory), str(groups)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _print_resident(directory: str, groups: int) -> None:
    assembler = SteadyAssembler(Path(directory), 256)
    for _ in range(0, groups, PROBE):
        assembler.cpu_ms()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    print(pages * resource.getpagesize() / 2**20)


def _raise(error: Exception) -> None:
    raise error


if __name__ == "__main__":
    _print_resident(sys.argv[1], int(sys.argv[2]))
