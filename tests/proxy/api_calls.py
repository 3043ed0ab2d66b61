"""One small request to every API that generates, whole or as a stream, with how its answers end and fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HELLO: Any = [{"role": "user", "content": "hello"}]


@dataclass(frozen=True)
class Api:
    """`finished`: what only a finished stream has; `broken`: what stands in the frame of one that broke."""

    name: str
    path: str
    body: dict[str, Any]
    finished: tuple[bytes, ...]
    broken: bytes

    def request(self, *, stream: bool) -> dict[str, Any]:
        return {**self.body, "stream": stream}


APIS = (
    Api(
        "generate",
        "/generate",
        {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 20}},
        (b"[DONE]", b'"hoofprint"'),
        b'data: {"error":',
    ),
    Api(
        "chat",
        "/v1/chat/completions",
        {"model": "p", "messages": HELLO, "max_tokens": 20},
        (b"[DONE]", b'"finish_reason":"stop"', b'"finish_reason":"length"'),
        b'data: {"error":',
    ),
    Api(
        "completions",
        "/v1/completions",
        {"model": "p", "prompt": "hello", "max_tokens": 20},
        (b"[DONE]", b'"finish_reason":"stop"', b'"finish_reason":"length"'),
        b'data: {"error":',
    ),
    Api(
        "responses",
        "/v1/responses",
        {"model": "p", "input": "hello", "max_output_tokens": 20},
        (b"response.completed", b"response.incomplete"),
        b"response.failed",
    ),
    Api(
        "messages",
        "/v1/messages",
        {"model": "p", "messages": HELLO, "max_tokens": 20},
        (b"message_stop", b"message_delta"),
        b"event: error",
    ),
)
CASES = [(api, stream) for api in APIS for stream in (False, True)]
