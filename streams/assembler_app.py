"""The assembler as a process: a Faust worker with one agent of a few lines around `AssemblerWorker`.

No tables, no sinks, concurrency 1 (`faust_private` says why). Before records of a new assignment are handled, the closed
attempts are known up to the end of `control.v1` and of the verdicts at that moment; a thread follows them afterwards.
An infrastructure error ends the process with one line and a status that is not 0; the supervisor starts it again, and it
goes on from the marks. SIGTERM: what is acknowledged is committed, the rest is read again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterable
from typing import TYPE_CHECKING

import structlog

from journal.clock import system_clock
from journal.log_setup import configure_logging
from journal.payloads import PayloadStore
from journal.producer import AckProducer
from journal.topic_admin import broker_setting, wait_for_broker
from schemas import topics
from schemas.errors import HoofprintError, TransportError
from schemas.settings import Settings
from streams.assembler_follower import ClosedFollower
from streams.assembler_watchdog import Watchdog
from streams.assembler_worker import AssemblerWorker
from streams.assembly import AssemblyRules
from streams.assembly_closed import ClosedAttempts

if TYPE_CHECKING:
    import faust

log = structlog.get_logger()
_TICK_S = 1.0
_SESSION_S = 2.0
_START_S = 20.0
_STOP_S = 8.0


class Assembler:
    """One run of the process: worker, followers and Faust app put together. Also the owner of the marks."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._kafka = settings, settings.kafka
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[Exception | None] = self._loop.create_future()
        self._closed = ClosedAttempts()
        self._producer = AckProducer(settings.kafka, f"{settings.run.run_id}-assembler")
        self._follower = ClosedFollower(
            settings.kafka, settings.proxy.session_max_age_s, self._closed, self.fail
        )
        self._worker = AssemblerWorker(
            AssemblyRules.of(settings), self._closed, PayloadStore(settings.payload_url, settings.payload.fsync),
            self._producer, system_clock, self.fail,
        )  # fmt: skip

    def low_water(self, partition: int) -> int | None:
        """The offset to commit."""
        return self._worker.low_water(partition)

    def forget(self) -> None:
        """Everything is about to be read again from the marks."""
        self._worker.forget()

    async def prepare(self) -> None:
        """Wait until nothing is in flight, then until the closed attempts are known as they are now."""
        while self._worker.in_flight and not self._end.done():  # noqa: ASYNC110 — a thread counts them down
            await asyncio.sleep(0.02)
        await self._follower.catch_up()

    def fail(self, error: Exception) -> None:
        """End the process with this error. Any thread."""
        self._loop.call_soon_threadsafe(self._finish, error)

    async def run(self) -> int:
        """Until SIGTERM (0) or a failure (1)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._finish, None)
        app = build_app(self._settings, self)
        ticking = asyncio.create_task(self._work(app))
        error = await self._end
        ticking.cancel()
        return await self._stop(app, error)

    async def take(self, app: faust.App, stream: AsyncIterable[object]) -> None:
        """The agent. A failure ends the process: Faust alone would acknowledge the chunk and go on."""
        from streams.faust_private import Chunk, is_current

        try:
            async for chunk in stream:
                assert isinstance(chunk, Chunk)
                if is_current(app, chunk) and not self._end.done():
                    self._worker.handle(chunk.partition, chunk.records)
        except Exception as error:  # noqa: BLE001 — process boundary: whatever it is must not be swallowed
            self._worker.freeze()
            self._finish(error)

    async def _work(self, app: faust.App) -> None:
        from faust.contrib.asgi import bind_to_running_loop

        try:
            bind_to_running_loop(app)
            app.finalize()
            async with asyncio.timeout(self._kafka.publish_timeout_s + _START_S):
                await app.maybe_start()
            log.info("assembling", run_id=self._settings.run.run_id)
            await self._tick(app)
        except TimeoutError:  # Faust waits for ever when the broker goes away while it starts
            self._finish(
                TransportError("Faust did not start", bootstrap_servers=self._kafka.bootstrap_servers)
            )
        except Exception as error:  # noqa: BLE001 — process boundary, as above
            self._finish(error)

    async def _tick(self, app: faust.App) -> None:
        from streams.faust_private import read_to_end

        topic = topics.SEGMENTS.full_name(self._kafka.topic_prefix)
        watch = Watchdog(self._kafka, self._worker.next_offset)
        while not app.should_stop:
            await asyncio.sleep(_TICK_S)
            self._worker.tick(lambda partition, offset: read_to_end(app, topic, partition, offset))
            await watch.look(app)
        raise TransportError(f"Faust gave up: {app.crash_reason!r}")

    def _finish(self, error: Exception | None) -> None:
        if not self._end.done():
            self._end.set_result(error)

    async def _stop(self, app: faust.App, error: Exception | None) -> int:
        """Acknowledge, commit, leave the group; within seconds, whatever hangs."""
        if error is None:
            log.info("stopping", **self._worker.counts)
        else:
            log.error("assembler_failed", error=error, exc_info=not isinstance(error, HoofprintError))
        try:
            async with asyncio.timeout(_STOP_S):
                if error is None:
                    await asyncio.to_thread(self._producer.flush)
                await app.stop()
                await asyncio.to_thread(self._follower.close)
        except (TimeoutError, HoofprintError) as problem:
            log.warning("stopped_hard", error=problem)
        sys.stderr.flush()
        # not by return: threads of a consumer that waits for its group would keep the process
        os._exit(0 if error is None else 1)


def build_app(settings: Settings, assembler: Assembler) -> faust.App:
    """The Faust app with its one agent and the consumer that commits marks."""
    import faust

    from streams.faust_private import install

    kafka = settings.kafka
    home = settings.run_directory / "assembler"
    home.mkdir(parents=True, exist_ok=True)
    shortest = broker_setting(kafka, "group.min.session.timeout.ms")
    session_s = max(_SESSION_S, int(shortest or 0) / 1000)
    app = faust.App(
        ".".join(part for part in (kafka.topic_prefix, settings.run.run_id, "assembler") if part),
        broker="kafka://" + kafka.bootstrap_servers.replace(",", ";kafka://"),
        datadir=str(home),  # stays empty: there are no tables
        topic_allow_declare=False,
        topic_disable_leader=True,
        web_enabled=False,
        stream_wait_empty=False,
        stream_buffer_maxsize=8,
        table_standby_replicas=0,
        consumer_auto_offset_reset="earliest",
        broker_commit_interval=1.0,
        broker_session_timeout=session_s,
        broker_heartbeat_interval=session_s / 4,
        broker_rebalance_timeout=session_s * 2,
    )
    install(app, assembler, settings.assembler.chunk_records)
    segments = app.topic(
        topics.SEGMENTS.full_name(kafka.topic_prefix),
        key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw",
    )  # fmt: skip

    @app.agent(segments, concurrency=1, name="assemble")
    async def assemble(stream: faust.StreamT[object]) -> None:
        await assembler.take(app, stream)

    return app


def main(settings: Settings) -> int:
    """Run until SIGTERM. ConfigError and TransportError before the start give their one line as well."""
    configure_logging("assembler")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the loop runs, nothing has to be put away
    import mode.loop

    mode.loop.use("uvloop")  # before Faust is imported

    async def run() -> int:
        return await Assembler(settings).run()

    try:
        wait_for_broker(settings.kafka, settings.kafka.publish_timeout_s)
        return asyncio.run(run())
    except HoofprintError as error:
        log.error("assembler_failed", error=error)  # noqa: TRY400 — the line is for people, not a traceback
        return 1
