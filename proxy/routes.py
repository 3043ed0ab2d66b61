"""Every route of the proxy, in one table: inside a session's base URL, and outside of any.

The endpoints are plain ASGI (see `asgi.py`). Invariant: what is served is what `/openapi.json` describes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, NamedTuple

import orjson
from starlette.routing import Route as StarletteRoute

from proxy import openapi
from proxy.asgi import Bounds, Call, Count, Endpoint, Handler
from proxy.errors_http import render_error
from proxy.front import Front
from proxy.messages_reply import render_anthropic
from proxy.metrics import Metrics
from proxy.parts import Parts
from schemas.errors import HoofprintError, UnknownSession

_SESSION = "/s/{token}"


class Route(NamedTuple):
    """`api`: the path without the session's token, as metrics and the document know it."""

    method: str
    path: str
    handler: Handler
    api: str


class NoSuchRoute(UnknownSession):
    """No endpoint has this method and path."""

    code = "not_found"


def _inside(parts: Parts) -> Iterator[tuple[str, str, Handler]]:
    """What an agent and its session use."""
    yield "POST", "/generate", parts.native.generate
    yield "POST", "/v1/chat/completions", parts.chat.completions
    yield "POST", "/v1/completions", parts.completions.completions
    yield "POST", "/v1/responses", parts.responses.responses
    yield "POST", "/v1/messages", parts.messages.messages
    yield "POST", "/v1/messages/count_tokens", parts.messages.count_tokens
    yield "POST", "/session/finalize", parts.sessions.finalize
    yield "POST", "/session/discard", parts.sessions.discard
    yield "POST", "/session/reward", parts.sessions.reward
    yield "GET", "/v1/models", parts.operations.models


def _outside(parts: Parts) -> Iterator[tuple[str, str, Handler]]:
    """What belongs to no session."""
    yield "POST", "/sessions", parts.sessions.open
    yield "POST", "/v1/policy/versions", parts.policy.versions
    yield "POST", "/v1/rollout/pause", parts.policy.pause
    yield "POST", "/v1/rollout/resume", parts.policy.resume
    yield "GET", "/v1/rollout/pause_state", parts.policy.pause_state
    yield "GET", "/v1/engines", parts.engines.engines
    yield "POST", "/v1/engines/{engine_id:path}/drain", parts.engines.drain
    yield "POST", "/v1/engines/{engine_id:path}/undrain", parts.engines.undrain
    yield "GET", "/health", parts.operations.health
    yield "GET", "/readyz", parts.operations.ready
    yield "GET", "/metrics", parts.operations.metrics
    yield "GET", "/v1/stats", parts.operations.stats


def _table(parts: Parts) -> Iterator[Route]:
    for method, path, handler in _inside(parts):
        yield Route(method, _SESSION + path, handler, path)
    for method, path, handler in (*_inside(parts), *_outside(parts)):
        yield Route(method, path, handler, path)


def _document(routes: list[Route]) -> Route:
    """The route that describes the others."""
    described = [(r.method, r.path, r.api, (r.handler.__doc__ or r.api).split("\n", 1)[0]) for r in routes]
    raw = orjson.dumps(openapi.document(described, metadata.version("hoofprint")))
    return Route("GET", "/openapi.json", lambda call: call.reply(raw), "/openapi.json")


def add_routes(app: Front, parts: Parts) -> None:
    """All of them, before any that the application has already; anything else is a 404 of ours."""
    proxy, metrics = parts.settings.proxy, parts.metrics
    bounds = Bounds(proxy.max_header_bytes, proxy.client_stall_s)
    routes = list(_table(parts))
    endpoints = {
        (r.method, r.path): Endpoint(r.handler, _refusal(metrics, r.api), _counter(metrics, r.api), bounds)
        for r in (*routes, _document(routes))
    }
    app.router.routes[:0] = [
        StarletteRoute(path, endpoint, methods=[method]) for (method, path), endpoint in endpoints.items()
    ]
    app.direct |= {(method, path): endpoints[method, path] for method, path, _ in _inside(parts)}
    missing = Endpoint(_not_found, render_error, _counter(metrics, "unknown"), bounds)
    app.router.routes.append(
        StarletteRoute("/{path:path}", missing, methods=["GET", "POST", "PUT", "DELETE", "PATCH"])
    )


async def _not_found(call: Call) -> None:
    raise NoSuchRoute(f"there is no {call.scope['method']} {call.scope['path']}")


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
