"""A Faust app as a process of ours: it starts, it is watched, and it ends with a status.

An infrastructure error, or whatever else an agent meets, ends the process with one line and status 1: Faust alone would
acknowledge the record and go on. SIGTERM ends it with 0 within seconds, whatever hangs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING

import structlog

from journal.topic_admin import broker_setting, create_topics, wait_for_broker
from schemas.errors import ConfigError, HoofprintError, TransportError
from schemas.ids import worker_group
from schemas.settings import Settings
from schemas.topics import Topic

if TYPE_CHECKING:
    import faust

    from streams.faust_private import MarkOwner

log = structlog.get_logger()
_SESSION_S = 2.0
_START_S = 40.0
_STOP_S = 8.0
Handler = Callable[["faust.App", AsyncIterable[object]], Awaitable[None]]


def make_app(
    settings: Settings, name: str, topic: Topic, owner: MarkOwner, handler: Handler, chunk_records: int
) -> faust.App:
    """An app with one agent, concurrency 1, on one topic; no tables, no sinks, marks instead of acknowledgements."""
    import faust

    from streams.faust_private import install

    kafka = settings.kafka
    home = settings.run_directory / name
    home.mkdir(parents=True, exist_ok=True)
    shortest = broker_setting(kafka, "group.min.session.timeout.ms")
    session_s = max(_SESSION_S, int(shortest or 0) / 1000)
    app = faust.App(
        worker_group(kafka.topic_prefix, settings.run.run_id, name),
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
    install(app, owner, chunk_records)
    source = app.topic(
        topic.full_name(kafka.topic_prefix),
        key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw",
    )  # fmt: skip

    @app.agent(source, concurrency=1, name=name)
    async def take(stream: faust.StreamT[object]) -> None:
        await handler(app, stream)

    return app


class FaustProcess:
    """One run of the process, in the loop that makes it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[Exception | None] = self._loop.create_future()

    @property
    def ended(self) -> bool:
        """Whether nothing may be handled any more."""
        return self._end.done()

    def fail(self, error: Exception) -> None:
        """End the process with this error. Any thread."""
        self._loop.call_soon_threadsafe(self.finish, error)

    def finish(self, error: Exception | None) -> None:
        """The same in the loop; None: as asked."""
        if not self._end.done():
            self._end.set_result(error)

    async def run(
        self,
        app: faust.App,
        tick: Callable[[], Awaitable[None]],
        release: Callable[[bool], Awaitable[None]],
        tick_s: float = 1.0,
    ) -> int:
        """Until SIGTERM (0) or a failure (1). `release(in order)`: flush and close what is ours."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.finish, None)
        working = asyncio.create_task(self._work(app, tick, tick_s))
        error = await self._end
        working.cancel()
        if error is None:
            log.info("stopping")
        else:
            log.error(
                "process_failed", part=self._name, error=error, exc_info=not isinstance(error, HoofprintError)
            )
        try:
            async with asyncio.timeout(_STOP_S):
                await release(error is None)
                await app.stop()
        except (TimeoutError, HoofprintError) as problem:
            log.warning("stopped_hard", error=problem)
        sys.stderr.flush()
        # not by return: threads of a consumer that waits for its group would keep the process
        os._exit(0 if error is None else 1)

    async def _work(self, app: faust.App, tick: Callable[[], Awaitable[None]], tick_s: float) -> None:
        try:
            await self._start(app)
            while not app.should_stop:
                await asyncio.sleep(tick_s)
                await tick()
            self.finish(TransportError(f"Faust gave up: {app.crash_reason!r}"))
        except Exception as error:  # noqa: BLE001 — process boundary: whatever it is must not be swallowed
            self.finish(error)

    async def _start(self, app: faust.App) -> None:
        from faust.contrib.asgi import bind_to_running_loop

        bind_to_running_loop(app)
        app.finalize()
        try:
            async with asyncio.timeout(_START_S):
                await app.maybe_start()
        except TimeoutError:  # Faust waits for ever when the broker goes away while it starts
            raise TransportError("Faust did not start", part=self._name, waited_s=_START_S) from None
        log.info("working")


def run_process(name: str, settings: Settings, run: Callable[[], Coroutine[None, None, int]]) -> int:
    """Exit status: 0 as asked, 1 for what may work at the next try, 2 for a wrong configuration; each with one line.

    Before anything else the topics are there, as the settings say: Faust would wait for a missing one for ever.
    """
    import mode.loop

    mode.loop.use("uvloop")  # before Faust is imported
    try:
        wait_for_broker(settings.kafka, settings.kafka.publish_timeout_s)
        create_topics(settings.kafka)
        return asyncio.run(run())
    except HoofprintError as error:
        log.error("process_failed", part=name, error=error)  # noqa: TRY400 — the line is for people, not a traceback
        return 2 if isinstance(error, ConfigError) else 1
