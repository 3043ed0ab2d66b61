"""The controller as a process: a Faust worker with one agent on `control.v1` around the pure fold.

Nothing is committed: at every assignment the state is folded again from offset 0, and of the effects only those are written
that their topics lack (`control_output`). All effects of a record are acknowledged before the next record is taken. A
second controller of the run waits as a member of the group and takes over when the first one dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterable, Sequence
from typing import TYPE_CHECKING

import structlog

from journal.log_setup import configure_logging
from journal.producer import AckProducer
from journal.topic_admin import wait_for_broker
from schemas import topics
from schemas.errors import HoofprintError
from schemas.events import EndOfBatches, Event, TrainBatch
from schemas.settings import Settings
from streams.assembler_watchdog import Watchdog
from streams.control_output import read_buried, read_written
from streams.control_worker import ControllerWorker, RawRecord
from streams.faust_process import FaustProcess, make_app
from streams.group_filters import load_filter
from streams.metrics_http import Number, serve_metrics
from streams.stream_numbers import controller_numbers

if TYPE_CHECKING:
    import faust

log = structlog.get_logger()


class Controller:
    """Worker, producer and Faust app put together. The owner of marks that never move."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process = FaustProcess("controller")
        self._producer = AckProducer(settings.kafka, f"{settings.run.run_id}-controller")
        self._worker: ControllerWorker | None = None
        self._handling = asyncio.Lock()

    def low_water(self, partition: int) -> int | None:
        """Nothing is committed."""
        return None

    def forget(self) -> None:
        """Another assignment: the log is read from its start again."""
        self._worker = None

    async def prepare(self) -> None:
        """Wait until nothing is in flight, then look what is written."""
        async with self._handling:
            try:
                self._worker = await asyncio.to_thread(self._resume)
            except HoofprintError as error:
                self._process.finish(error)

    def _resume(self) -> ControllerWorker:
        kafka, run_id = self._settings.kafka, self._settings.run.run_id
        outputs = (topics.VERDICTS, topics.BATCHES)
        written = {topic.name: read_written(kafka, topic, run_id) for topic in outputs}
        log.info(
            "folding", run_id=run_id, written={name: place.last_cause for name, place in written.items()}
        )
        return ControllerWorker(run_id, written, read_buried(kafka, run_id))

    async def run(self) -> int:
        """Until SIGTERM (0) or a failure (1)."""
        chunk = self._settings.assembler.chunk_records
        app = make_app(self._settings, "controller", topics.CONTROL, self, self.take, chunk)
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

    def _next_offset(self, partition: int) -> int | None:
        return self._worker.state.next_offset if self._worker is not None else None

    def _numbers(self) -> Iterable[Number]:
        worker = self._worker
        return controller_numbers(worker.state, worker.staleness) if worker is not None else ()

    async def _release(self, in_order: bool) -> None:
        if in_order:
            await asyncio.to_thread(self._producer.flush)


def _say(effects: Sequence[Event]) -> None:
    for effect in effects:
        if isinstance(effect, TrainBatch):
            log.info("batch", step=effect.step, groups=len(effect.groups), short=effect.short)
        elif isinstance(effect, EndOfBatches):
            log.info("end_of_batches", steps=effect.steps, reason=effect.reason)


def main(settings: Settings) -> int:
    """Run until SIGTERM. A TransportError before the start gives its one line as well. ConfigError: no such group filter."""
    configure_logging("controller")
    if settings.group.filter:
        load_filter(settings.group.filter)
    import mode.loop

    mode.loop.use("uvloop")  # before Faust is imported

    async def run() -> int:
        return await Controller(settings).run()

    try:
        wait_for_broker(settings.kafka, settings.kafka.publish_timeout_s)
        return asyncio.run(run())
    except HoofprintError as error:
        log.error("controller_failed", error=error)  # noqa: TRY400 — the line is for people, not a traceback
        return 1
