"""The application: every part made and joined, every route in one table.

FastAPI holds the routes and the lifespan; the endpoints are plain ASGI (see `asgi.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import orjson
import structlog
from starlette.routing import Route

from journal.clock import Clock
from journal.payloads import PayloadStore
from journal.producer import AckProducer
from proxy import claim_follower, openapi
from proxy.asgi import Bounds, Call, Count, Endpoint
from proxy.chat_api import ChatApi
from proxy.completions_api import CompletionsApi
from proxy.control_view import ControlView
from proxy.conversation import Conversations
from proxy.engines import Engine, engine_http
from proxy.engines_api import EnginesApi
from proxy.errors_http import render_error
from proxy.front import Front
from proxy.gate import Gate
from proxy.generation_control import GenerationController, Intervals
from proxy.limits import Limits
from proxy.messages_api import MessagesApi
from proxy.messages_reply import render_anthropic
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
from schemas.errors import ConfigError, HoofprintError, InvariantBroken, UnknownSession
from schemas.settings import Settings

log = structlog.get_logger(__name__)


@dataclass
class Parts:
    """Everything that lives as long as the process. `on_failure`: the log cannot be followed any more."""

    settings: Settings
    clock: Clock
    on_failure: Callable[[HoofprintError], None]
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings, clock = self.settings, self.clock
        proxy = settings.proxy
        if not proxy.engines:
            raise ConfigError("proxy.engines names no engine", key="proxy.engines")
        self.http = engine_http()
        self.producer = AckProducer(settings.kafka, "proxy", proxy.linger_ms)
        self.metrics = Metrics()
        self.gate = Gate()
        self.table = SessionTable(self.gate.open_session)
        self.limits = Limits(proxy)
        self.registry = EngineRegistry(
            [Engine(url, self.http, proxy.engine_timeout_s) for url in proxy.engines]
        )
        store = PayloadStore(settings.payload_url, settings.payload.fsync)
        signer = TokenSigner(signing_key(proxy.admin_key, settings.run_directory), settings.run.run_id)
        claimant = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.ownership = Ownership(clock, settings.kafka.publish_timeout_s, self.gate.open_session)
        self.recorder = Recorder(
            self.producer, self.ownership, store, self.table, settings, clock, self.metrics, claimant
        )
        self.control = ControlView(settings.run.run_id, self._close_attempt)
        recovery = Recovery(settings, self.recorder, self.ownership, store, signer, clock)
        self.access = SessionAccess(
            self.table, self.recorder, self.ownership, recovery, self.control, signer, self.limits,
            settings.run.run_id, settings.group.size, proxy.admin_key, clock,
        )  # fmt: skip
        self.sessions = SessionApi(
            self.access, self.recorder, clock, proxy.max_body_bytes, f"{proxy.host}:{proxy.port}"
        )
        intervals = Intervals(
            proxy.engine_stream_interval_streamed, proxy.engine_stream_interval, proxy.stream_frame_s
        )
        controller = GenerationController(
            self.registry, self.gate, settings.staleness, self.metrics,
            record_experts=proxy.record_routed_experts == "auto", intervals=intervals,
        )  # fmt: skip
        self.turns = Turns(
            controller, self.registry, self.access, self.recorder, self.limits, proxy, clock, self.metrics
        )
        tokenizers = Tokenizers(self.registry, self.control, settings.engine.model)
        pace = Pace(proxy.stream_frame_s, proxy.keepalive_s)
        self.native = NativeApi(self.access, self.turns, self.limits, self.metrics, tokenizers, pace)
        self.conversations = Conversations(
            self.access, self.turns, self.limits, self.metrics, tokenizers, pace
        )
        self.chat = ChatApi(self.conversations)
        self.completions = CompletionsApi(self.conversations)
        self.responses = ResponsesApi(self.conversations)
        self.messages = MessagesApi(self.conversations)
        self.updates = WeightUpdates(
            self.registry, self.gate, controller, self.control, self.producer, settings, clock
        )
        self.policy = PolicyApi(
            self.access,
            self.updates,
            self.registry,
            self.gate,
            controller,
            proxy.max_body_bytes,
            proxy.quiesce_timeout_s,
            clock,
        )
        self.engines = EnginesApi(
            self.access,
            self.registry,
            self.updates.catch_up,
            controller,
            proxy.max_body_bytes,
            proxy.quiesce_timeout_s,
        )
        self.operations = OperationsApi(
            self.registry,
            self.table,
            self.gate,
            self.control,
            self.limits,
            self.metrics,
            self.updates.catch_up,
            clock(),
        )

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
        task.add_done_callback(lambda task: _report(task, self.on_failure))
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


def build_app(settings: Settings, clock: Clock, on_failure: Callable[[HoofprintError], None]) -> Front:
    """The application; its parts come to life with its lifespan and stand in `app.state.parts`."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Front) -> AsyncIterator[None]:
        parts = Parts(settings, clock, on_failure)
        app.state.parts = parts
        starting = asyncio.ensure_future(parts.start())
        parts.tasks.append(starting)
        starting.add_done_callback(lambda task: _report(task, on_failure))
        _add_routes(app, parts)
        try:
            yield
        finally:
            await parts.stop()

    return Front(title="Hoofprint proxy", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)


def _report(task: asyncio.Task[Any], on_failure: Callable[[HoofprintError], None]) -> None:
    if task.cancelled() or (failure := task.exception()) is None:
        return
    on_failure(
        failure
        if isinstance(failure, HoofprintError)
        else InvariantBroken(f"the proxy's own work broke: {failure!r}")
    )


def _add_routes(app: Front, parts: Parts) -> None:
    native, chat, sessions, policy, engines, ops = (
        parts.native,
        parts.chat,
        parts.sessions,
        parts.policy,
        parts.engines,
        parts.operations,
    )
    inside: list[tuple[str, str, Any]] = [
        ("POST", "/generate", native.generate),
        ("POST", "/v1/chat/completions", chat.completions),
        ("POST", "/v1/completions", parts.completions.completions),
        ("POST", "/v1/responses", parts.responses.responses),
        ("POST", "/v1/messages", parts.messages.messages),
        ("POST", "/v1/messages/count_tokens", parts.messages.count_tokens),
        ("POST", "/session/finalize", sessions.finalize),
        ("POST", "/session/discard", sessions.discard),
        ("POST", "/session/reward", sessions.reward),
        ("GET", "/v1/models", ops.models),
    ]
    outside: list[tuple[str, str, Any]] = [
        ("POST", "/sessions", sessions.open),
        ("POST", "/v1/policy/versions", policy.versions),
        ("POST", "/v1/rollout/pause", policy.pause),
        ("POST", "/v1/rollout/resume", policy.resume),
        ("GET", "/v1/rollout/pause_state", policy.pause_state),
        ("GET", "/v1/engines", engines.engines),
        ("POST", "/v1/engines/{engine_id:path}/drain", engines.drain),
        ("POST", "/v1/engines/{engine_id:path}/undrain", engines.undrain),
        ("GET", "/health", ops.health),
        ("GET", "/readyz", ops.ready),
        ("GET", "/metrics", ops.metrics),
        ("GET", "/v1/stats", ops.stats),
    ]
    table = [(method, "/s/{token}" + path, handler, path) for method, path, handler in inside]
    table += [(method, path, handler, path) for method, path, handler in inside + outside]
    described = [
        (method, path, api, (handler.__doc__ or api).split("\n", 1)[0])
        for method, path, handler, api in table
    ]
    raw = orjson.dumps(openapi.document(described, metadata.version("hoofprint")))
    table.append(("GET", "/openapi.json", lambda call: call.reply(raw), "/openapi.json"))
    bounds = Bounds(parts.settings.proxy.max_header_bytes, parts.settings.proxy.client_stall_s)
    endpoints = {
        (method, path): Endpoint(handler, _refusal(parts.metrics, api), _counter(parts.metrics, api), bounds)
        for method, path, handler, api in table
    }
    app.router.routes[:0] = [
        Route(path, endpoint, methods=[method]) for (method, path), endpoint in endpoints.items()
    ]
    app.direct |= {(method, path): endpoints[method, path] for method, path, _ in inside}
    missing = Endpoint(_not_found, render_error, _counter(parts.metrics, "unknown"), bounds)
    app.router.routes.append(
        Route("/{path:path}", missing, methods=["GET", "POST", "PUT", "DELETE", "PATCH"])
    )


async def _not_found(call: Call) -> None:
    raise NoSuchRoute(f"there is no {call.scope['method']} {call.scope['path']}")


class NoSuchRoute(UnknownSession):
    """No endpoint has this method and path."""

    code = "not_found"


def _counter(metrics: Metrics, api: str) -> Count:
    def count(call: Call, status: int) -> None:
        metrics.request(api, status)
        metrics.transferred(call.bytes_in, call.bytes_out)

    return count


def _refusal(
    metrics: Metrics, api: str
) -> Callable[[HoofprintError], tuple[int, dict[str, Any], dict[str, str]]]:
    rendering = render_anthropic if api.startswith("/v1/messages") else render_error

    def render(error: HoofprintError) -> tuple[int, dict[str, Any], dict[str, str]]:
        metrics.refusal(error.code)
        return rendering(error)

    return render
