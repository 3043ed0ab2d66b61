"""End to end: from the first produce to the packed tensors of the last batch, through the processes of production.

A writer, an assembler, a controller and, here, the trainer's input: it takes a manifest, opens its payloads, packs the step
and asks for the next one. A round is 256 groups behind a warm-up of two steps in the same processes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import IO

from benchmarks.data_plane.stage import PATIENCE_S, Stage, cpu_of
from benchmarks.data_plane.workload import GROUP, RUN, STEP, VERSIONS, Shape, group_ids
from journal.payloads import PayloadStore
from journal.reader import TopicReader
from schemas import events as ev
from schemas import ids, topics
from schemas.codec import decode
from trainer.batches import BatchReader
from trainer.packing import pack_step

WARM_UP = 2 * STEP
GROUPS = 8 * STEP
_ORDINALS = {version: ordinal for ordinal, version in enumerate(VERSIONS)}


@dataclass
class StreamCost:
    """Of one round: trajectories a second, and CPU-ms per trajectory by process."""

    rate: float
    cpu_ms: dict[str, float] = field(default_factory=dict)

    @property
    def sum_ms(self) -> float:
        """All processes together."""
        return sum(self.cpu_ms.values())


class TrainerInput:
    """One request at a time, as the trainer does it."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._batches = TopicReader(stage.settings.kafka, [topics.BATCHES])
        self._read = BatchReader(
            PayloadStore(stage.settings.payload_url).open_arrow, mask_nonlast=False, std="bessel"
        )
        self._step = 1
        self.trained: list[str] = []
        self.tokens = 0

    def request(self) -> None:
        """Ask for the next batch."""
        request = ev.BatchRequested(
            run_id=RUN, occurred_at=1, step=self._step, batch_id=ids.batch_id(RUN, self._step)
        )
        self._stage.producer.send(ev.identified(request))

    def take(self, groups: int) -> None:
        """Pack batches until so many groups came."""
        left, deadline = groups, time.monotonic() + PATIENCE_S
        while left > 0:
            if time.monotonic() > deadline:
                raise SystemExit(f"{left} groups did not come within {PATIENCE_S} s")
            for record in self._batches.poll(0.5):
                batch = decode(record.value)
                if isinstance(batch, ev.TrainBatch) and batch.step == self._step:
                    self._pack(batch)
                    left -= len(batch.groups)

    def _pack(self, batch: ev.TrainBatch) -> None:
        data = self._read.read(batch, _ORDINALS)
        packed = pack_step(data.sequences, aggregation="token_mean", max_tokens=65_536)
        self.trained += [group.group_id for group in batch.groups]
        self.tokens += sum(len(part.tokens) for part in packed)
        self._step += 1
        self.request()

    def close(self) -> None:
        """End the reader."""
        self._batches.close()


class Writer:
    """The producing process."""

    def __init__(self, stage: Stage) -> None:
        file = str(stage.settings.run_directory.parent / "settings.json")
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.data_plane.writer", file],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        stage.children["writer"] = self._child  # type: ignore[assignment]  # its pipes are text

    def prepare(self, start: int, groups: int, shape: Shape) -> None:
        """Have the events made."""
        self._say(f"{start} {groups} {shape.turns} {shape.tokens}")
        self._hear()

    def go(self) -> None:
        """Write them."""
        self._say("go")

    def done(self) -> float:
        """CPU seconds, when all is acknowledged."""
        return float(self._hear())

    def _say(self, line: str) -> None:
        _pipe(self._child.stdin).write(line + "\n")
        _pipe(self._child.stdin).flush()

    def _hear(self) -> str:
        line = _pipe(self._child.stdout).readline()
        if not line:
            raise SystemExit("the writer ended")
        return line


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def measure(
    stage: Stage, broker_pid: int, shape: Shape, groups: int = GROUPS, rounds: int = 1
) -> list[StreamCost]:
    """So many rounds in the same processes, behind a warm-up."""
    writer, trainer = Writer(stage), TrainerInput(stage)
    stage.start("assembler")
    stage.start("controller")
    trainer.request()
    try:
        at = _round(stage, writer, trainer, broker_pid, shape, 0, WARM_UP)[0]
        costs = []
        for _ in range(rounds):
            at, cost = _round(stage, writer, trainer, broker_pid, shape, at, groups)
            costs.append(cost)
    finally:
        trainer.close()
    if len(set(trainer.trained)) != len(trainer.trained) or trainer.tokens != at * GROUP * shape.tokens:
        raise SystemExit(f"{at} groups were written, {len(set(trainer.trained))} trained")
    return costs


def _round(
    stage: Stage, writer: Writer, trainer: TrainerInput, broker_pid: int, shape: Shape, start: int, groups: int
) -> tuple[int, StreamCost]:  # fmt: skip
    stage.admit(group_ids(start, groups))
    writer.prepare(start, groups, shape)
    before = stage.cpu() | {"broker": cpu_of(broker_pid), "trainer input": time.process_time()}
    began = time.perf_counter()
    writer.go()
    trainer.take(groups)
    wall = time.perf_counter() - began
    after = stage.cpu() | {"broker": cpu_of(broker_pid), "trainer input": time.process_time()}
    writer.done()
    count = groups * GROUP
    cpu = {name: (after[name] - before[name]) / count * 1000 for name in after}
    return start + groups, StreamCost(count / wall, cpu)
