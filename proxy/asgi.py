"""The few ASGI moves of the hot path: one call, its body, its answer, its disconnect.

Plain ASGI endpoints stand as routes inside the FastAPI application: a training step makes hundreds of requests of a few
tokens each, and request models and response classes would cost more CPU than the tokens. Invariants: a body is bounded
before it is held, and so are headers; a client that goes away, or leaves its answer unread for too long, cancels the
work on its call at once; an error becomes one JSON answer, or, once a stream has begun, one last frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from traceback import extract_tb
from typing import Any, Protocol

import orjson
import structlog

from proxy.bounded_http import CONNECTION
from schemas.errors import BadRequest, HoofprintError, RolloutError

log = structlog.get_logger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_JSON = (b"content-type", b"application/json")
_PROMETHEUS = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_TOO_DEEP = "Recursion limit reached"
"""What orjson says."""
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


_HEADER_CHARACTERS = 1024
_KEY_CHARACTERS = 8192
"""A session token holds ids of up to 256 characters each."""
_KEYS = frozenset({"authorization", "x-api-key"})
_DIGITS = 10


class ClientGone(Exception):
    """The client closed the connection before its answer was complete, or does not read it."""


class BodyTooLarge(RolloutError):
    """The body exceeds `proxy.max_body_bytes`."""

    code = "body_too_large"
    http_status = 413


class HeadersTooLarge(RolloutError):
    """The headers exceed `proxy.max_header_bytes`."""

    code = "headers_too_large"
    http_status = 431


class Connection(Protocol):
    """What a call may know of the connection that it came through."""

    @property
    def is_full(self) -> bool: ...

    def abort(self) -> None: ...

    def hold(self) -> None: ...

    def release(self) -> None: ...

    def unframed(self, size: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a client may send, and how long it may leave its answer unread."""

    header_bytes: int
    stall_s: float


class Call:
    """One request and its answer. `started`: the answer's head has left, so only frames can follow."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, bounds: Bounds) -> None:
        self.scope = scope
        self.started = False
        self.frame_error: Callable[[dict[str, Any]], bytes] = event
        """How this API writes an error's body into a stream that has begun."""
        self.bytes_in = 0
        self.bytes_out = 0
        self._receive = receive
        self._send_now = send
        self._bounds = bounds
        self._headers: dict[bytes, bytes] | None = None

    @property
    def path_params(self) -> dict[str, str]:
        """What the route's placeholders matched."""
        found: dict[str, str] = self.scope.get("path_params") or {}
        return found

    def check_head(self) -> None:
        """HeadersTooLarge."""
        limit = self._bounds.header_bytes
        if sum(len(name) + len(value) for name, value in self.scope["headers"]) > limit:
            raise HeadersTooLarge(f"the headers are larger than {limit} bytes", max_header_bytes=limit)

    def header(self, name: str) -> str:
        """The first header of that (lower-case) name; empty if absent. BadRequest: too long, or not printable ASCII."""
        if self._headers is None:
            self._headers = {}
            for key, value in self.scope["headers"]:
                self._headers.setdefault(key, value)
        text = self._headers.get(name.encode(), b"").decode("latin-1").strip()
        longest = _KEY_CHARACTERS if name in _KEYS else _HEADER_CHARACTERS
        if len(text) > longest or not (text.isascii() and text.isprintable()):
            raise BadRequest(f"{name} must be at most {longest} printable ASCII characters", field=name)
        return text

    def whole_number(self, name: str) -> int | None:
        """A header that is a whole number below 2^31; None if absent. BadRequest."""
        text = self.header(name)
        if not text:
            return None
        if len(text) > _DIGITS or not text.isdecimal() or int(text) >= 2**31:
            raise BadRequest(f"{name} must be a whole number below 2^31", field=name)
        return int(text)

    async def body(self, limit: int) -> bytes:
        """The whole body. BodyTooLarge; ClientGone."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            self.bytes_in += len(part)
            if size > limit:
                raise BodyTooLarge(f"the body is larger than {limit} bytes", max_body_bytes=limit)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def json(self, limit: int) -> dict[str, Any]:
        """The body as a JSON object; BadRequest if it is something else."""
        return parsed(await self.body(limit))

    async def reply(self, payload: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """One JSON answer."""
        raw = (
            payload
            if isinstance(payload, bytes)
            else orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
        )
        head = [_JSON, (b"content-length", str(len(raw)).encode())]
        head += [
            (name.encode(), value.encode("latin-1", "replace")) for name, value in (headers or {}).items()
        ]
        await self._whole(status, head, raw)

    async def text(self, raw: bytes) -> None:
        """One plain text answer, in Prometheus' format."""
        await self._whole(200, [_PROMETHEUS, (b"content-length", str(len(raw)).encode())], raw)

    async def _whole(self, status: int, head: list[tuple[bytes, bytes]], raw: bytes) -> None:
        """Head and body in one piece: a head of its own would wake the client twice."""
        self.started = True
        connection: Connection | None = self.scope.get(CONNECTION)
        if connection is not None:
            connection.hold()
        try:
            await self._send({"type": "http.response.start", "status": status, "headers": head})
            await self._send({"type": "http.response.body", "body": raw})
        finally:
            if connection is not None:
                connection.release()

    async def start_events(self) -> None:
        """Open a stream of server-sent events."""
        self.started = True
        self._without_chunks(0)
        await self._send({"type": "http.response.start", "status": 200, "headers": _EVENTS})

    async def frame(self, raw: bytes, *, last: bool = False) -> None:
        """Bytes of the stream."""
        self._without_chunks(len(raw))
        await self._send({"type": "http.response.body", "body": raw, "more_body": not last})

    def _without_chunks(self, size: int) -> None:
        connection: Connection | None = self.scope.get(CONNECTION)
        if connection is not None and self.scope["http_version"] == "1.0":
            connection.unframed(size)

    async def _send(self, message: Message) -> None:
        """Waits while the client's buffers are full, but not for ever. ClientGone."""
        self.bytes_out += len(message.get("body", b""))
        connection: Connection | None = self.scope.get(CONNECTION)
        if connection is None or not connection.is_full:
            await self._send_now(message)
            return
        try:
            async with asyncio.timeout(self._bounds.stall_s):
                await self._send_now(message)
        except TimeoutError:
            connection.abort()
            await asyncio.sleep(0)  # the server shall see that the connection is lost before the call ends
            raise ClientGone from None
        # it may have ended because the client went: that shall cancel the call before it does anything more
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def disconnected(self) -> None:
        """Return when the client has gone (after the body, a disconnect is the only message left)."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


def parsed(raw: bytes) -> dict[str, Any]:
    """A body as a JSON object; BadRequest if it is something else."""
    try:
        value = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as wrong:
        raise BadRequest(f"the body is not JSON: {wrong}", field="body") from wrong
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object", field="body")
    return value


def event(payload: object) -> bytes:
    """One `data:` frame."""
    return b"data: " + orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"


Handler = Callable[[Call], Awaitable[None]]
Count = Callable[[Call, int], None]
RenderError = Callable[[HoofprintError], tuple[int, dict[str, Any], dict[str, str]]]


class Endpoint:
    """A handler as an ASGI application. Callable with three arguments, so that a route takes it as it is."""

    def __init__(self, handler: Handler, render: RenderError, count: Count, bounds: Bounds) -> None:
        self._handler = handler
        self._render = render
        self._count = count
        self._bounds = bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send, self._bounds)
        try:
            call.check_head()
            await self._handler(call)
            self._count(call, 200)
        except ClientGone:
            self._count(call, 499)
        except HoofprintError as error:
            await self._answer_error(call, error)
        except Exception as broke:  # noqa: BLE001 — the process boundary
            await self._answer_error(call, _answer_to(broke))

    async def _answer_error(self, call: Call, error: HoofprintError) -> None:
        status, body, headers = self._render(error)
        try:
            if call.started:
                await call.frame(call.frame_error(body), last=True)
            else:
                await call.reply(body, status, headers)
        except ClientGone:
            status = 499
        self._count(call, status)


def _answer_to(broke: Exception) -> HoofprintError:
    """A mistake of ours becomes one answer and one line in the log. Not ours: orjson reads deeper than it writes, also what
    stands as text in a body, so what is nested too deeply shows when it is recorded."""
    if isinstance(broke, TypeError) and str(broke) == _TOO_DEEP:
        return BadRequest("the body is nested too deeply", field="body")
    # not its text: that may repeat what a client sent
    places = [f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in extract_tb(broke.__traceback__)]
    log.error("request_broke", kind=type(broke).__name__, at=places[-8:])
    return HoofprintError("the proxy made a mistake; its log says more")


async def while_connected(call: Call, work: Awaitable[Any]) -> Any:
    """Do the work in this task; cancel it when the client goes, and raise ClientGone then."""
    task = asyncio.current_task()
    assert task is not None
    watch = asyncio.ensure_future(call.disconnected())
    gone = False

    def cancel(done: asyncio.Future[None]) -> None:
        nonlocal gone
        if not done.cancelled():
            gone = True
            task.cancel()

    watch.add_done_callback(cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watch.remove_done_callback(cancel)
        watch.cancel()
