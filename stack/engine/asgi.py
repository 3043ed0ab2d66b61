"""The few ASGI moves that the engine needs: read a body, send JSON, send server-sent events.

Why no framework: a rollout step sends hundreds of requests of a few tokens each, and routing, middleware
and request objects would cost more CPU than the tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_JSON = [(b"content-type", b"application/json")]
_TEXT = [(b"content-type", b"text/plain; charset=utf-8")]
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(receive: Receive) -> bytes:
    """The whole request body."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def send_json(send: Send, status: int, payload: object) -> None:
    """One response; a string goes out as plain text, None as an empty body."""
    if payload is None or isinstance(payload, str):
        body, headers = (payload or "").encode(), _TEXT
    else:
        body, headers = orjson.dumps(payload), _JSON
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def start_events(send: Send) -> None:
    """Open a stream of server-sent events."""
    await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})


async def send_event(send: Send, payload: object, *, last: bool = False) -> None:
    """One `data:` frame; the last one is followed by `[DONE]`."""
    tail = b"\n\ndata: [DONE]\n\n" if last else b"\n\n"
    await send(
        {
            "type": "http.response.body",
            "body": b"data: " + orjson.dumps(payload) + tail,
            "more_body": not last,
        }
    )
