"""kill -9 of an assembler at full speed: what was lost, what came twice, and how long nothing came.

A single assembler is started again at once; with two, the other one goes on. The pause of the survivor is the longest time
without a new `GroupCompleted` of its own partitions behind the kill.
"""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from benchmarks.data_plane.stage import Stage
from benchmarks.data_plane.stream import TrainerInput, Writer
from benchmarks.data_plane.workload import STEP, Shape, group_ids
from journal.reader import TopicReader
from journal.topic_admin import number_of_partitions, partition_of
from schemas import events as ev
from schemas import topics
from schemas.codec import decode

WARM_UP = STEP
GROUPS = 24 * STEP
KILL_AFTER = 4 * STEP


class CrashCost(NamedTuple):
    """`first_s`: from the kill to the first new completion. `pause_s`: longest gap of the partitions that stayed."""

    lost: int
    twice: int
    first_s: float
    pause_s: float


def measure(stage: Stage, workers: int) -> CrashCost:
    """One kill behind a warm-up."""
    writer, trainer = Writer(stage), TrainerInput(stage)
    control = TopicReader(stage.settings.kafka, [topics.CONTROL])
    names = [f"assembler-{number}" for number in range(workers)]
    for name in names:
        stage.start("assembler", name)
    stage.start("controller")
    trainer.request()
    stage.admit(group_ids(0, WARM_UP + GROUPS))
    writer.prepare(0, WARM_UP, Shape())
    writer.go()
    trainer.take(WARM_UP)
    writer.done()
    if workers > 1:
        time.sleep(4)  # the second one has its partitions before the clock runs
    writer.prepare(WARM_UP, GROUPS, Shape())
    writer.go()
    arrivals, killed = _follow(stage, control, names[0], restart=workers == 1)
    trainer.take(GROUPS)
    trainer.close()
    control.close()
    trained = Counter(trainer.trained)
    lost = WARM_UP + GROUPS - len(trained)
    twice = sum(trained.values()) - len(trained)
    behind = sorted(at for at, _ in arrivals if at > killed)
    return CrashCost(lost, twice, behind[0] - killed, _pause(stage, arrivals, killed))


def _follow(
    stage: Stage, control: TopicReader, victim: str, *, restart: bool
) -> tuple[list[tuple[float, str]], float]:
    """Completions as they arrive; the kill comes after so many."""
    arrivals: list[tuple[float, str]] = []
    seen: set[str] = set()
    killed = 0.0

    def all_there() -> bool:
        nonlocal killed
        for record in control.poll(0.005):
            event = decode(record.value)
            if isinstance(event, ev.GroupCompleted) and event.group_id not in seen:
                seen.add(event.group_id)
                arrivals.append((time.perf_counter(), event.group_id))
        if not killed and len(seen) >= WARM_UP + KILL_AFTER:
            stage.kill(victim)
            killed = time.perf_counter()
            if restart:
                stage.start("assembler", victim)
        return len(seen) >= WARM_UP + GROUPS

    stage.until(all_there, "completions")
    return arrivals, killed


def _pause(stage: Stage, arrivals: list[tuple[float, str]], killed: float) -> float:
    """Of the partition that had the shortest longest gap: it belonged to the survivor."""
    partitions = number_of_partitions(stage.settings.kafka, topics.SEGMENTS)
    by_partition: dict[int, list[float]] = {p: [killed] for p in range(partitions)}
    for at, group in arrivals:
        if at > killed:
            by_partition[partition_of(group.encode(), partitions)].append(at)
    gaps = (max((b - a for a, b in pairwise(times)), default=float("inf")) for times in by_partition.values())
    return min(gaps)
