"""The assembler as a process: a Faust worker with one agent of a few lines around `AssemblerWorker`.

No tables, no sinks, concurrency 1 (`faust_private` says why). Before records of a new assignment are handled, the closed
attempts are known up to the end of `control.v1` and of the verdicts at that moment; a thread follows them afterwards.
An infrastructure error ends the process with one line and a status that is not 0; the supervisor starts it again, and it
goes on from the marks. SIGTERM: what is acknowledged is committed, the rest is read again.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterable
from typing import TYPE_CHECKING

import structlog

from journal.clock import system_clock
from journal.log_setup import configure_logging
from journal.metrics_http import serve_metrics
from journal.payloads import PayloadStore
from journal.producer import AckProducer
from schemas import topics
from schemas.ids import worker_group
from schemas.settings import Settings
from streams.assembler_follower import ClosedFollower
from streams.assembler_watchdog import Watchdog
from streams.assembler_worker import AssemblerWorker
from streams.assembly import AssemblyRules
from streams.assembly_closed import ClosedAttempts
from streams.faust_process import FaustProcess, make_app, run_process
from streams.stream_numbers import assembler_numbers

if TYPE_CHECKING:
    import faust

log = structlog.get_logger()


class Assembler:
    """One run of the process: worker, followers and Faust app put together. Also the owner of the marks."""

    def __init__(self, settings: Settings) -> None:
        kafka = settings.kafka
        self._settings = settings
        self._process = FaustProcess("assembler")
        self._producer = AckProducer(kafka, f"{settings.run.run_id}-assembler")
        closed = ClosedAttempts(settings.run.run_id)
        group = worker_group(kafka.topic_prefix, settings.run.run_id, "assembler")
        self._follower = ClosedFollower(
            kafka, group, settings.proxy.session_max_age_s, closed, self._process.fail
        )
        self._worker = AssemblerWorker(
            AssemblyRules.of(settings), closed, PayloadStore(settings.payload_url, settings.payload.fsync),
            self._producer, system_clock, self._process.fail,
        )  # fmt: skip

    def low_water(self, partition: int) -> int | None:
        """The offset to commit."""
        return self._worker.low_water(partition)

    def forget(self) -> None:
        """Everything is about to be read again from the marks."""
        self._worker.forget()

    async def prepare(self) -> None:
        """Wait until the closed attempts are known as they are now."""
        await self._follower.catch_up()

    async def run(self) -> int:
        """Until SIGTERM (0) or a failure (1)."""
        from streams.faust_private import read_to_end

        kafka = self._settings.kafka
        chunk = self._settings.assembler.chunk_records
        app = make_app(self._settings, "assembler", topics.SEGMENTS, self, self.take, chunk)
        serve_metrics(
            self._settings.metrics.assembler_port,
            lambda: assembler_numbers(self._worker.counts, self._worker.open_groups),
            or_next=True,
        )
        watch = Watchdog(kafka, self._worker.next_offset)
        topic = topics.SEGMENTS.full_name(kafka.topic_prefix)

        async def tick() -> None:
            self._worker.tick(lambda partition, offset: read_to_end(app, topic, partition, offset))
            await watch.look(app)

        return await self._process.run(app, tick, self._release)

    async def take(self, app: faust.App, stream: AsyncIterable[object]) -> None:
        """The agent. A failure ends the process."""
        from streams.faust_private import Chunk, is_current

        try:
            async for chunk in stream:
                assert isinstance(chunk, Chunk)
                if is_current(app, chunk) and not self._process.ended:
                    self._worker.handle(chunk.partition, chunk.records)
        except Exception as error:  # noqa: BLE001 — process boundary: whatever it is must not be swallowed
            self._worker.freeze()
            self._process.finish(error)

    async def _release(self, in_order: bool) -> None:
        """What is acknowledged by now is committed when the app stops."""
        log.info("assembled", open_groups=self._worker.open_groups, **self._worker.counts)
        if in_order:
            await asyncio.to_thread(self._producer.flush)
        await asyncio.to_thread(self._follower.close)


def main(settings: Settings) -> int:
    """Exit status, see `run_process`."""
    configure_logging("assembler")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the loop runs, nothing has to be put away

    async def run() -> int:
        return await Assembler(settings).run()

    return run_process("assembler", settings, run)
