"""A run under load in which something is broken on purpose: who writes, who starts again what ended, and who takes the time.

The writer stays `AHEAD` groups in front of the completions, so that every partition has work whenever something breaks. A
recovery is over when each partition has given a completion that was made behind the fault (its own time says so), as it
arrives at a reader; of the controller, when a batch has.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.data_plane.stage import Stage
from benchmarks.data_plane.workload import RUN, Shape, group_ids, interleaved, trajectories
from journal.producer import AckProducer
from journal.reader import TopicReader
from journal.topic_admin import number_of_partitions, partition_of
from schemas import events as ev
from schemas import ids, topics
from schemas.codec import decode

AHEAD = 96
_AT_ONCE = 16
_PATIENT = {"publish_timeout_s": 60.0}


class Outcome(NamedTuple):
    """Seconds until it went on, and what the batches say of the groups that were acknowledged."""

    seconds: float
    lost: int
    twice: int


class LoadedRun:
    """`groups` are written in all. The stage's children are started by whoever breaks them."""

    def __init__(self, stage: Stage, groups: int) -> None:
        self._stage = stage
        self.names = group_ids(0, groups)
        kafka = stage.settings.kafka.model_copy(update=_PATIENT)
        self._partitions = number_of_partitions(kafka, topics.SEGMENTS)
        self._producer = AckProducer(kafka, "bench-load")
        self._reader = TopicReader(kafka, [topics.CONTROL, topics.BATCHES])
        self._completed: set[str] = set()
        self._batches: dict[str, ev.TrainBatch] = {}
        self._arrived: list[
            tuple[float, float, int | None]
        ] = []  # arrival, own time, partition (None: a batch)
        self._step = 0
        self._supervised: dict[str, str] = {}
        stage.admit(self.names)
        self._request()
        self._writing = threading.Thread(target=self._write, daemon=True)

    def start(self, part: str, name: str | None = None) -> None:
        """A process that is started again when it ends by itself."""
        self._supervised[name or part] = part
        self._stage.start(part, name)

    def kill(self, name: str, *, again: bool = True) -> None:
        """kill -9; started again at once, or never."""
        part = self._supervised.pop(name)
        self._stage.kill(name)
        if again:
            self.start(part, name)

    def load(self, until_completed: int) -> None:
        """Begin to write, and wait until so many groups are complete."""
        self._writing.start()
        self.until(lambda: len(self._completed) >= until_completed, "groups do not complete")

    def recovery(self, *, of_batches: bool = False) -> Callable[[], float]:
        """Call it where something breaks; what it gives waits, and tells the seconds that it took."""
        began, at = time.monotonic(), time.time()
        wanted: set[int | None] = {None} if of_batches else set(range(self._partitions))

        def behind() -> dict[int | None, float]:
            first: dict[int | None, float] = {}
            for arrival, own, where in self._arrived:
                if arrival > began and own >= at:
                    first.setdefault(where, arrival)
            return first

        def wait() -> float:
            self.until(lambda: wanted <= behind().keys(), "nothing goes on")
            return max(behind()[where] for where in wanted) - began

        return wait

    def finish(self, seconds: float) -> Outcome:
        """Wait for the rest. What is lost then is lost."""
        self.until(lambda: not self._writing.is_alive(), "not everything is acknowledged")
        self.until(lambda: len(self._batched()) >= len(self.names), "groups are missing in the batches")
        counts = Counter(self._batched())
        twice = sum(count - 1 for count in counts.values())
        self._producer.close()
        self._reader.close()
        return Outcome(seconds, len(set(self.names) - counts.keys()), twice)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Read, train, supervise, until it holds."""

        def pumped() -> bool:
            self._pump()
            return holds()

        self._stage.until(pumped, what)

    def _pump(self) -> None:
        for record in self._reader.poll(0.02):
            now, event = time.monotonic(), decode(record.value)
            if isinstance(event, ev.GroupCompleted) and event.group_id not in self._completed:
                self._completed.add(event.group_id)
                where = partition_of(event.group_id.encode(), self._partitions)
                self._arrived.append((now, record.timestamp_ms / 1000, where))
            elif isinstance(event, ev.TrainBatch) and event.batch_id not in self._batches:
                self._batches[event.batch_id] = event
                self._arrived.append((now, record.timestamp_ms / 1000, None))
                self._request()
        for name, part in self._supervised.items():
            if self._stage.children[name].poll() is not None:
                self._stage.start(part, name)

    def _request(self) -> None:
        self._step += 1
        request = ev.BatchRequested(
            run_id=RUN, occurred_at=1, step=self._step, batch_id=ids.batch_id(RUN, self._step)
        )
        self._producer.post(ev.identified(request))

    def _batched(self) -> list[str]:
        return [group.group_id for batch in self._batches.values() for group in batch.groups]

    def _write(self) -> None:
        for start in range(0, len(self.names), _AT_ONCE):
            while start - len(self._completed) > AHEAD:
                time.sleep(0.002)
            for event in interleaved(trajectories(Shape(), self.names[start : start + _AT_ONCE])):
                self._producer.post(event)
        self._producer.flush()
