"""What a durable put (acks=all) costs: 64 asyncio sessions, each awaiting its acknowledgement before its next turn.

A round is over in a fraction of a second, and a broker that has just started is several times slower than a warm one. So a
whole round warms up, and several follow in the same processes.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import uvloop

from benchmarks.data_plane.stage import Stage, cpu_of
from benchmarks.data_plane.workload import AT_ONCE, STEP, Shape, group_ids, trajectories
from journal.producer import AckProducer
from schemas.events import TokenSegment

GROUPS = 8 * STEP


class PutCost(NamedTuple):
    """Per trajectory: CPU-ms at the producer and at the broker; trajectories a second."""

    producer_ms: float
    broker_ms: float
    rate: float


def measure(
    stage: Stage, broker_pid: int, shape: Shape, groups: int = GROUPS, rounds: int = 5
) -> list[PutCost]:
    """So many rounds behind one that warms up."""
    sessions = trajectories(shape, group_ids(0, groups))
    producer = AckProducer(stage.settings.kafka, "bench-put", stage.settings.proxy.linger_ms)
    uvloop.run(_put(producer, sessions))
    costs = [_round(producer, broker_pid, sessions) for _ in range(rounds)]
    producer.close()
    return costs


def _round(producer: AckProducer, broker_pid: int, sessions: list[list[TokenSegment]]) -> PutCost:
    broker, own, began = cpu_of(broker_pid), time.process_time(), time.perf_counter()
    uvloop.run(_put(producer, sessions))
    wall = time.perf_counter() - began
    own, broker = time.process_time() - own, cpu_of(broker_pid) - broker
    count = len(sessions)
    return PutCost(own / count * 1000, broker / count * 1000, count / wall)


async def _put(producer: AckProducer, sessions: list[list[TokenSegment]]) -> None:
    waiting = iter(sessions)

    async def session() -> None:
        for segments in waiting:  # the next trajectory that nobody has taken
            for segment in segments:
                await producer.apublish(segment)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(session())
