"""Everything that lives as long as the process, made in the order in which it needs one another, and joined.

Invariant: making the parts starts nothing; `start` does, and `stop` leaves nothing running.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from journal.clock import Clock
from journal.payloads import PayloadStore
from journal.producer import AckProducer
from proxy import claim_follower
from proxy.chat_api import ChatApi
from proxy.completions_api import CompletionsApi
from proxy.control_view import ControlView
from proxy.conversation import Conversations
from proxy.drains import Drains
from proxy.engines import Engine, engine_http
from proxy.engines_api import EnginesApi
from proxy.gate import Gate
from proxy.generation_control import GenerationController, Intervals
from proxy.limits import Limits
from proxy.messages_api import MessagesApi
from proxy.metrics import Metrics
from proxy.native_api import NativeApi
from proxy.operations_api import OperationsApi
from proxy.ownership import Ownership
from proxy.policy_api import PolicyApi
from proxy.recorder import Recorder
from proxy.recovery import Recovery
from proxy.registry import EngineRegistry
from proxy.responses_api import ResponsesApi
from proxy.session_access import SessionAccess
from proxy.session_api import SessionApi
from proxy.sessions import SessionTable
from proxy.streaming import Pace
from proxy.tito import Tokenizers
from proxy.tokens_auth import TokenSigner, signing_key
from proxy.turns import Turns
from proxy.weight_update import WeightUpdates
from schemas.errors import ConfigError, HoofprintError, InvariantBroken
from schemas.settings import Settings

log = structlog.get_logger(__name__)


class Parts:
    """The proxy without its routes. `on_failure`: the process cannot do its work any more."""

    def __init__(
        self, settings: Settings, clock: Clock, on_failure: Callable[[HoofprintError], None]
    ) -> None:
        if not settings.proxy.engines:
            raise ConfigError("proxy.engines names no engine", key="proxy.engines")
        self.settings = settings
        self.clock = clock
        self.on_failure = on_failure
        self.tasks: list[asyncio.Task[Any]] = []
        self.http = engine_http()
        self.producer = AckProducer(settings.kafka, "proxy", settings.proxy.linger_ms)
        self.metrics = Metrics()
        self.gate = Gate()
        self.limits = Limits(settings.proxy)
        self._make_engines()
        self._make_sessions()
        self._make_turns()
        self._make_agent_apis()
        self._make_admin_apis()

    def _make_engines(self) -> None:
        proxy = self.settings.proxy
        self.drains = Drains(self.settings.run_directory)
        drained = self.drains.read()
        engines = [Engine(url, self.http, proxy.engine_timeout_s) for url in proxy.engines]
        for engine in engines:
            engine.draining = engine.engine_id in drained
        self.registry = EngineRegistry(engines)
        self.control = ControlView(self.settings.run.run_id, self._close_attempt)
        intervals = Intervals(
            proxy.engine_stream_interval_streamed, proxy.engine_stream_interval, proxy.stream_frame_s
        )
        self.controller = GenerationController(
            self.registry, self.gate, self.settings.staleness, self.metrics,
            record_experts=proxy.record_routed_experts == "auto", intervals=intervals,
        )  # fmt: skip
        self.updates = WeightUpdates(
            self.registry, self.gate, self.controller, self.control, self.producer, self.settings, self.clock
        )

    def _make_sessions(self) -> None:
        settings, clock = self.settings, self.clock
        proxy, run_id = settings.proxy, settings.run.run_id
        self.table = SessionTable(self.gate.open_session)
        store = PayloadStore(settings.payload_url, settings.payload.fsync)
        signer = TokenSigner(signing_key(proxy.admin_key, settings.run_directory), run_id)
        claimant = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.ownership = Ownership(clock, settings.kafka.publish_timeout_s, self.gate.open_session)
        self.recorder = Recorder(
            self.producer, self.ownership, store, self.table, settings, clock, self.metrics, claimant
        )
        recovery = Recovery(settings, self.recorder, self.ownership, store, signer, clock)
        self.access = SessionAccess(
            self.table, self.recorder, self.ownership, recovery, self.control, signer, self.limits, run_id,
            settings.group.size, proxy.admin_key, clock,
        )  # fmt: skip
        self.sessions = SessionApi(
            self.access, self.recorder, clock, proxy.max_body_bytes, f"{proxy.host}:{proxy.port}"
        )

    def _make_turns(self) -> None:
        proxy = self.settings.proxy
        self.turns = Turns(
            self.controller, self.registry, self.access, self.recorder, self.limits, proxy, self.clock, self.metrics
        )  # fmt: skip
        self.tokenizers = Tokenizers(self.registry, self.control, self.settings.engine.model)
        self.pace = Pace(proxy.stream_frame_s, proxy.keepalive_s)
        self.conversations = Conversations(
            self.access, self.turns, self.limits, self.metrics, self.tokenizers, self.pace
        )

    def _make_agent_apis(self) -> None:
        self.native = NativeApi(
            self.access, self.turns, self.limits, self.metrics, self.tokenizers, self.pace
        )
        self.chat = ChatApi(self.conversations)
        self.completions = CompletionsApi(self.conversations)
        self.responses = ResponsesApi(self.conversations)
        self.messages = MessagesApi(self.conversations)

    def _make_admin_apis(self) -> None:
        proxy, catch_up = self.settings.proxy, self.updates.catch_up
        self.policy = PolicyApi(
            self.access, self.updates, self.registry, self.gate, self.controller, proxy.max_body_bytes,
            proxy.quiesce_timeout_s, self.clock,
        )  # fmt: skip
        self.engines = EnginesApi(
            self.access, self.registry, catch_up, self.controller, self.drains, proxy.max_body_bytes,
            proxy.quiesce_timeout_s,
        )  # fmt: skip
        self.operations = OperationsApi(
            self.registry, self.table, self.gate, self.control, self.limits, self.metrics, catch_up, self.clock()
        )  # fmt: skip

    def _close_attempt(self, group_id: str, attempt: int) -> None:
        self.sessions.close_attempt(group_id, attempt)

    async def start(self) -> None:
        """Fold the log, bring the engines to the newest version, then watch. Serving begins before that, with 503."""
        await claim_follower.begin(self.ownership, self.settings.kafka)
        await self.control.start(self.settings.kafka, self.on_failure)
        await self.updates.at_start()
        self._background(self.updates.catch_up.watch())
        self._background(claim_follower.watch(self.ownership))
        self._background(self.sessions.expire(self.settings.proxy.session_idle_s))
        log.info(
            "proxy_ready", engines=[repr(e) for e in self.registry.engines], version=self.registry.wanted
        )

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        """Work for as long as the process lives: without it, the process ends and is started anew."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda task: report(task, self.on_failure))
        self.tasks.append(task)

    async def stop(self) -> None:
        """Leave nothing running; records in flight are acknowledged first, and no engine stays paused."""
        await self.policy.stop()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.recorder.drain()
        await self.ownership.stop()
        await self.control.stop()
        await self.http.close()
        await asyncio.to_thread(self.producer.close)


def report(task: asyncio.Task[Any], on_failure: Callable[[HoofprintError], None]) -> None:
    """What a task that has ended means for the process: nothing, or its end."""
    if task.cancelled() or (failure := task.exception()) is None:
        return
    on_failure(
        failure
        if isinstance(failure, HoofprintError)
        else InvariantBroken(f"the proxy's own work broke: {failure!r}")
    )
