"""Anthropic's replies: a message whole, the events of its stream, errors. Pure."""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

from proxy.conversation import Talk
from proxy.errors_http import render_error
from proxy.reply_sections import Part
from schemas.errors import GenerationPreempted, HoofprintError, StalenessExceeded, TrajectoryVersionChanged

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def event_of(payload: dict[str, Any]) -> bytes:
    """One server-sent event under its type's name."""
    return b"event: " + str(payload["type"]).encode() + b"\ndata: " + orjson.dumps(payload) + b"\n\n"


PING = event_of({"type": "ping"})


def render_anthropic(error: HoofprintError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Anthropic's shape, our code and facts beside it. What must not be tried again comes as 400."""
    status, body, headers = render_error(error)
    if isinstance(error, StalenessExceeded | TrajectoryVersionChanged | GenerationPreempted):
        status = 400
        headers["x-should-retry"] = "false"
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return status, {"type": "error", "error": {**body["error"], "type": kind, "status": status}}, headers


def error_event(body: dict[str, Any]) -> bytes:
    """The last frame of a stream that broke."""
    return event_of(body)


def usage(talk: Talk) -> dict[str, Any]:
    """Input that was not cached, cached input, output."""
    generation = talk.generation
    cached = min(generation.cached_tokens, len(generation.prompt))
    return {
        "input_tokens": len(generation.prompt) - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(generation.output_ids),
    }


def stop_of(talk: Talk) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence`."""
    finish = talk.generation.finish
    if talk.message.get("tool_calls"):
        return "tool_use", None
    if finish.get("type") == "length":
        return "max_tokens", None
    matched = finish.get("matched")
    if isinstance(matched, str) and matched in talk.request.stops:
        return "stop_sequence", matched
    return "end_turn", None


def signature(thinking: str) -> str:
    """Clients want one and send it back; nothing depends on it."""
    return hashlib.sha256(thinking.encode()).hexdigest()[:32]


def tool_uses(talk: Talk) -> list[dict[str, Any]]:
    """The calls as blocks."""
    return [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": _input(call["function"]["arguments"]),
        }
        for call in talk.message.get("tool_calls") or ()
    ]


def _input(arguments: str) -> dict[str, Any]:
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"input": arguments}


def head_of(talk: Talk) -> dict[str, Any]:
    """A message before anything of it is known."""
    return {
        "id": f"msg_{talk.name}",
        "type": "message",
        "role": "assistant",
        "model": talk.request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage(talk), "output_tokens": 0},
    }


def whole(talk: Talk, place: dict[str, Any]) -> dict[str, Any]:
    """The whole message."""
    message = talk.message
    reasoning, text = message.get("reasoning_content"), message["content"]
    content: list[dict[str, Any]] = []
    if reasoning:
        content.append({"type": "thinking", "thinking": reasoning, "signature": signature(reasoning)})
    if text:
        content.append({"type": "text", "text": text})
    reason, sequence = stop_of(talk)
    return {
        **head_of(talk),
        "content": [*content, *tool_uses(talk)],
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage(talk),
        "hoofprint": place,
    }


class Events:
    """The events of one streamed message: one block is open at a time."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._index = -1
        self._open: Part | None = None

    def start(self) -> bytes:
        """The message begins."""
        return event_of({"type": "message_start", "message": head_of(self._talk)})

    def delta(self, part: Part, text: str) -> bytes:
        """More of a part; its block is opened with its first piece."""
        frames = b""
        if self._open != part:
            empty: dict[str, Any] = (
                {"type": "text", "text": ""}
                if part == "content"
                else {"type": "thinking", "thinking": "", "signature": ""}
            )
            frames = self._close() + self._start_block(empty)
            self._open = part
        delta = (
            {"type": "text_delta", "text": text}
            if part == "content"
            else {"type": "thinking_delta", "thinking": text}
        )
        return frames + self._delta(delta)

    def end(self, place: dict[str, Any]) -> bytes:
        """Everything that may make an agent act: calls, the reason of the end, usage."""
        frames = [self._close()]
        for block in tool_uses(self._talk):
            json = orjson.dumps(block["input"]).decode()
            frames.append(self._start_block({**block, "input": {}}))
            frames.append(self._delta({"type": "input_json_delta", "partial_json": json}))
            frames.append(event_of({"type": "content_block_stop", "index": self._index}))
        reason, sequence = stop_of(self._talk)
        frames.append(
            event_of(
                {
                    "type": "message_delta",
                    "delta": {"stop_reason": reason, "stop_sequence": sequence},
                    "usage": usage(self._talk),
                    "hoofprint": place,
                }
            )
        )
        frames.append(event_of({"type": "message_stop"}))
        return b"".join(frames)

    def _start_block(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return event_of({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event_of({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        frames = b""
        if self._open == "reasoning":
            sign = signature(self._talk.message.get("reasoning_content") or "")
            frames = self._delta({"type": "signature_delta", "signature": sign})
        self._open = None
        return frames + event_of({"type": "content_block_stop", "index": self._index})
