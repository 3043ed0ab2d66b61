"""The controller as a process: a Faust worker with one agent on `control.v1` around the pure fold.

All effects of a record are acknowledged before the next record is taken, and the committed offset is only the place from
which Faust hands out records. At every assignment the state is folded again up to there, from the newest snapshot or from
offset 0, without Faust and without effects; of the effects behind it only those are written that their topics lack
(`control_output`). A second controller of the run waits as a member of the group and takes over when the first one dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterable, Sequence
from typing import TYPE_CHECKING

import structlog

from journal.log_setup import configure_logging
from journal.metrics_http import Number, serve_metrics
from journal.producer import AckProducer
from schemas import topics
from schemas.errors import HoofprintError
from schemas.events import EndOfBatches, Event, TrainBatch
from schemas.settings import Settings
from streams.assembler_watchdog import Watchdog
from streams.control_output import holds, read_buried, read_written, records_until
from streams.control_snapshot import Snapshots
from streams.control_worker import ControllerWorker, RawRecord
from streams.faust_process import FaustProcess, make_app, run_process
from streams.group_filters import load_filter
from streams.stream_numbers import controller_numbers

if TYPE_CHECKING:
    import faust

log = structlog.get_logger()
_PARTITION = 0


class Controller:
    """Worker, producer and Faust app put together. `_mark`: everything below is folded and its effects are acknowledged."""

    def __init__(self, settings: Settings, producer: AckProducer | None = None) -> None:
        self._settings = settings
        self._process = FaustProcess("controller")
        self._producer = producer or AckProducer(settings.kafka, f"{settings.run.run_id}-controller")
        self._worker: ControllerWorker | None = None
        self._handling = asyncio.Lock()
        self._app: faust.App | None = None
        self._mark: int | None = None
        self._snapshots = Snapshots(settings.run_directory / "controller", settings.run.run_id)

    def low_water(self, partition: int) -> int | None:
        """The offset to commit."""
        return self._mark

    def forget(self) -> None:
        """Another assignment: the state is folded again."""
        self._worker = self._mark = None

    async def prepare(self) -> None:
        """Wait until nothing is in flight, then look what is written, and fold that."""
        from streams.faust_private import committed_offsets

        assert self._app is not None
        async with self._handling:
            committed = committed_offsets(self._app)
            if _PARTITION not in committed:
                return  # another controller has it
            try:
                self._worker = await asyncio.to_thread(self._resume, committed[_PARTITION] or 0)
            except HoofprintError as error:
                self._process.finish(error)

    def _resume(self, committed: int) -> ControllerWorker:
        """What stands below the committed offset, or has a later effect in every topic, has all its effects written."""
        kafka, run_id = self._settings.kafka, self._settings.run.run_id
        outputs = (topics.VERDICTS, topics.BATCHES)
        written = {topic.name: read_written(kafka, topic, run_id) for topic in outputs}
        state = self._snapshots.load(lambda offset, event_id: holds(kafka, offset, event_id))
        start = state.next_offset
        worker = ControllerWorker(run_id, written, read_buried(kafka, run_id), state)
        for record in records_until(kafka, start, max(worker.written_below, committed)):
            worker.skim(record.offset, record.key, record.value)
        log.info(
            "folding", run_id=run_id, snapshot=start, at=state.next_offset,
            written={name: place.last_cause for name, place in written.items()},
        )  # fmt: skip
        return worker

    async def run(self) -> int:
        """Until SIGTERM (0) or a failure (1)."""
        chunk = self._settings.assembler.chunk_records
        app = self._app = make_app(self._settings, "controller", topics.CONTROL, self, self.take, chunk)
        serve_metrics(self._settings.metrics.controller_port, self._numbers)
        watch = Watchdog(self._settings.kafka, self._next_offset, topics.CONTROL)

        async def tick() -> None:
            await watch.look(app)

        return await self._process.run(app, tick, self._release)

    async def take(self, app: faust.App, stream: AsyncIterable[object]) -> None:
        """The agent. A failure ends the process."""
        from streams.faust_private import Chunk, is_current

        try:
            async for chunk in stream:
                assert isinstance(chunk, Chunk)
                async with self._handling:
                    if is_current(app, chunk) and self._worker is not None:
                        await self._handle(self._worker, chunk.records)
        except Exception as error:  # noqa: BLE001 — process boundary: whatever it is must not be swallowed
            self._process.finish(error)

    async def _handle(self, worker: ControllerWorker, records: Sequence[RawRecord]) -> None:
        for record in records:
            if self._process.ended or self._worker is not worker:
                return  # the rest is read again
            effects = worker.take(record)
            if effects:
                sent = [asyncio.wrap_future(self._producer.send(effect)) for effect in effects]
                await asyncio.gather(*sent)
                _say(effects)
            if self._worker is worker:
                self._mark = worker.state.next_offset
        if self._snapshots.due(worker.state):
            await asyncio.to_thread(self._snapshots.save, worker.state)

    def _next_offset(self, partition: int) -> int | None:
        return self._worker.state.next_offset if self._worker is not None else None

    def _numbers(self) -> Iterable[Number]:
        worker = self._worker
        return controller_numbers(worker.state, worker.staleness) if worker is not None else ()

    async def _release(self, in_order: bool) -> None:
        if not in_order:
            return
        await asyncio.to_thread(self._producer.flush)
        async with self._handling:  # a record in work has its effects acknowledged behind it
            if self._worker is not None and self._worker.state.last_id:
                await asyncio.to_thread(self._snapshots.save, self._worker.state)


def _say(effects: Sequence[Event]) -> None:
    for effect in effects:
        if isinstance(effect, TrainBatch):
            log.info("batch", step=effect.step, groups=len(effect.groups), short=effect.short)
        elif isinstance(effect, EndOfBatches):
            log.info("end_of_batches", steps=effect.steps, reason=effect.reason)


def main(settings: Settings) -> int:
    """Exit status, see `run_process`. ConfigError: no such group filter."""
    configure_logging("controller")
    if settings.group.filter:
        load_filter(settings.group.filter)

    async def run() -> int:
        return await Controller(settings).run()

    return run_process("controller", settings, run)
