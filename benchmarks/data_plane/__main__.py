"""All figures of the data plane: ours through the processes of production on a real broker, peers beside it.

`python -m benchmarks.data_plane [put stream crash flat peers]` runs some of it. Rates depend on who else uses the cores: the
median of several rounds counts, and the note has the spread and how loaded the machine was. CPU-ms are process CPU.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.data_plane import crash, flat, put, stream
from benchmarks.data_plane.peers import environment
from benchmarks.data_plane.stage import Stage
from benchmarks.data_plane.workload import STEP, Shape
from benchmarks.figures import Figure, publish
from stack.broker.embedded import EmbeddedKafka

PEERS = ("reverb", "transferqueue")
TRAJECTORIES = 2048
ROUNDS = 3
FLAT_ROUNDS = 7
Peers = dict[str, dict[str, float]]


class Bench:
    """A broker, a scratch directory, what the peers reached, and the figures so far."""

    def __init__(self, broker: EmbeddedKafka, scratch: Path, peers: Peers) -> None:
        self._broker, self._scratch = broker, scratch
        self.peers = peers
        self.figures: list[Figure] = []
        self.notes: list[str] = []

    def stage(self, name: str, *, partitions: int = 4, fsync: bool = False) -> Stage:
        """Topics and processes of a figure's own."""
        return Stage(self._broker.bootstrap_servers, self._scratch / name, partitions=partitions, fsync=fsync)

    def best(self, key: str, choose: Callable[[list[float]], float]) -> float | None:
        """Of the peers."""
        known = [figures[key] for figures in self.peers.values() if key in figures]
        return choose(known) if known else None

    def add(
        self, figure: str, unit: str, ours: float, goal: str | None = None, reference: float | None = None
    ) -> None:
        """A row of the table."""
        self.figures.append(Figure(figure, unit, round(ours, 4), goal, reference))

    def middle(self, what: str, values: list[float]) -> float:
        """The median; lowest and highest go into the note."""
        self.notes.append(f"{what}: {min(values):.4g} to {max(values):.4g} in {len(values)} rounds")
        return statistics.median(values)

    def put(self) -> None:
        """Cost of a durable put."""
        peer = self.best("put_ms", min)
        for turns, goal in ((1, "<= 0.15"), (8, "<= 0.1")):
            shape = Shape(turns)
            with self.stage(f"put{turns}") as stage:
                rounds = put.measure(stage, self._broker.pid, shape)
            name = f"put, {shape.name}"
            own = self.middle(name, [cost.producer_ms / turns for cost in rounds])
            self.add(f"{name}, producer", "CPU-ms/turn", own, goal, peer)
            broker = statistics.median(cost.broker_ms / turns for cost in rounds)
            self.add(f"{name}, broker", "CPU-ms/turn", broker)
            peer = None  # peers have no turns

    def stream(self) -> None:
        """Produce to packed tensors."""
        peer = self.best("rate", max)
        cases = (
            (Shape(), False, "> 1801"), (Shape(), True, ">= 1400"), (Shape(8), False, ">= 1200"), (Shape(1, 512), False, None),
            (Shape(1, 8192), False, None),
        )  # fmt: skip
        for shape, fsync, goal in cases:
            with self.stage(f"stream{shape.turns}.{shape.tokens}.{fsync:d}", fsync=fsync) as stage:
                rounds = stream.measure(stage, self._broker.pid, shape, rounds=ROUNDS)
            name = f"stream, {shape.name}{', synced' if fsync else ''}"
            same = peer if shape.tokens == Shape().tokens else None
            self.add(name, "trajectories/s", self.middle(name, [c.rate for c in rounds]), goal, same)
            middle = sorted(rounds, key=lambda c: c.sum_ms)[len(rounds) // 2]
            shares = ", ".join(f"{process} {ms:.2f}" for process, ms in middle.cpu_ms.items())
            self.add(f"{name}: all processes", "CPU-ms/trajectory", middle.sum_ms)
            self.notes.append(f"{name}: {shares}")

    def crash(self) -> None:
        """kill -9 of an assembler at full speed."""
        for workers in (1, 2):
            with self.stage(f"crash{workers}") as stage:
                cost = crash.measure(stage, workers)
            name = f"kill -9 of 1 of {workers}"
            self.add(f"{name}, lost", "groups", cost.lost, "== 0", self.best("lost", min))
            self.add(f"{name}, twice", "groups", cost.twice, "== 0", self.best("twice", min))
            if workers == 1:
                self.add(f"{name}, first new completion", "s", cost.first_s, "<= 3")
            else:
                self.add(f"{name}, pause of the other", "s", cost.pause_s, "<= 1")

    def flat(self) -> None:
        """Costs that must not grow."""
        rounds = flat.open_groups_ms(self._scratch / "open", FLAT_ROUNDS)
        few = statistics.median(few for few, _ in rounds)
        # by pairs, measured one behind the other: the load of the machine changes more than the code does
        self.add(
            "10,000 open groups over 1,000, CPU per trajectory", "ratio",
            self.middle("10,000 open groups over 1,000", [many / few for few, many in rounds]), "<= 1.2",
        )  # fmt: skip
        self.add("1,000 open groups, assembler alone", "CPU-ms/trajectory", few)
        short, long = (
            flat.resident_mib(self._scratch / f"resident{groups}", groups) for groups in (2_048, 20_480)
        )
        self.add("assembler resident, 10 times the groups", "MiB", long, f"<= {short * 1.1:.1f}", short)
        by_partitions = [self._partitions(partitions) for partitions in (1, 8)]
        goal = f"<= {by_partitions[0] * 1.2:.4f}"
        self.add(
            "8 partitions (reference 1)",
            "CPU-ms/trajectory",
            by_partitions[1],
            goal,
            round(by_partitions[0], 4),
        )

    def _partitions(self, partitions: int) -> float:
        with self.stage(f"partitions{partitions}", partitions=partitions) as stage:
            rounds = stream.measure(stage, self._broker.pid, Shape(), groups=4 * STEP, rounds=ROUNDS)
        return self.middle(f"{partitions} partitions", [cost.sum_ms for cost in rounds])


def main(chosen: list[str]) -> None:
    """Peers first: they are the references."""
    began = time.monotonic()
    peers: Peers = {}
    notes = [f"load average at the start {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"]
    for name in PEERS if not chosen or "peers" in chosen else ():
        found = environment.measured(name, Shape().tokens, TRAJECTORIES)
        if isinstance(found, str):
            notes.append(found)
        else:
            peers[name] = found
            notes.append(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()))
    with tempfile.TemporaryDirectory() as scratch, EmbeddedKafka() as broker:
        bench = Bench(broker, Path(scratch), peers)
        for name, measure in (
            ("put", bench.put), ("stream", bench.stream), ("crash", bench.crash), ("flat", bench.flat),
        ):  # fmt: skip
            if not chosen or name in chosen:
                measure()
                print(f"{name}: done after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    notes += [
        *bench.notes,
        f"{time.monotonic() - began:.0f} s",
        f"load average at the end {os.getloadavg()[0]:.1f}",
    ]
    publish("data_plane", bench.figures, note="; ".join(notes))


if __name__ == "__main__":
    main(sys.argv[1:])
