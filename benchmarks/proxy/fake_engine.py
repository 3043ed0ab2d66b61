"""An engine of fixed speed in SGLang's shapes, cheap enough to leave the cores to what is measured.

Token `p` of a reply is number `p` of a list read at the start, whatever the prompt is, so that a preempted reply can be
checked by position. Every request has its own pace: one token each `token_ms`, told every `stream_interval` tokens.
Cumulative or incremental streams, abort by rid with the partial output, pause, updates. `GET /clock` says when the first
token of each request left.

    python -m benchmarks.proxy.fake_engine PORT TOKENS.json TOKEN_MS {cumulative|incremental}
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import httptools
import orjson
import uvloop

_EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_DONE = b"data: [DONE]\n\n"
WINDOW, VOCABULARY = 32_768, 151_669


class Reply:
    """One reply on its way. `written`: tokens told so far."""

    def __init__(self, engine: Engine, connection: Connection, body: dict[str, Any]) -> None:
        sampling = body["sampling_params"]
        self.rid = body["rid"]
        self._engine, self._connection = engine, connection
        self._first = len(body["input_ids"])
        self._limit = int(sampling["max_new_tokens"])
        self._streams = bool(body.get("stream"))
        self._step = int(sampling.get("stream_interval") or 1) if self._streams else self._limit
        self._ids: list[bytes] = []
        self._triples: list[bytes] = []
        self._told = 0
        self._began = time.perf_counter()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """The first token comes after its own time."""
        if self._engine.token_s == 0:
            self._grow(self._limit)
            self.end({"type": "length", "length": self._limit})
        else:
            self._at(1)

    def _at(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        due = self._began + count * self._engine.token_s
        self._timer = loop.call_later(max(0.0, due - time.perf_counter()), self._reach, count)

    def _reach(self, count: int) -> None:
        self._grow(count)
        if count == self._limit:
            self.end({"type": "length", "length": count})
            return
        if self._streams:
            if self._told == 0:
                self._engine.first[self.rid] = time.time()
            self._tell(None)
        self._at(min(self._limit, count + self._step - (count == 1 and self._step > 1)))

    def _grow(self, count: int) -> None:
        tokens = self._engine.tokens
        for at in range(len(self._ids), count):
            token = tokens[(self._first + at) % len(tokens)]
            self._ids.append(b"%d" % token)
            self._triples.append(b"[-%.9f,%d,null]" % (((at * 37) % 1000) / 977.0, token))

    def _tell(self, finish: dict[str, Any] | None) -> None:
        known = self._told if self._engine.incremental else 0
        self._told = len(self._ids)
        label = orjson.dumps(self._engine.version)
        meta = b'"id":"%s","finish_reason":%s,"prompt_tokens":%d,"weight_version":%s,"completion_tokens":%d,"cached_tokens":0' % (
            self.rid.encode(), orjson.dumps(finish), self._first, label, len(self._ids),
        )  # fmt: skip
        if finish is not None:
            meta += b',"weight_versions":[{"version":%s,"start":0,"end":%d}],"e2e_latency":0.1' % (
                label,
                len(self._ids),
            )
        reply = (
            b'{"text":"","output_ids":[%s],"meta_info":{%s,"output_token_logprobs":[%s],"output_token_logprobs_length":%d}}'
            % (b",".join(self._ids[known:]), meta, b",".join(self._triples[known:]), len(self._ids))
        )
        if self._streams:
            self._connection.chunk(b"data: " + reply + b"\n\n")
        else:
            self._connection.whole(reply)

    def end(self, finish: dict[str, Any]) -> None:
        """Tell the rest and close the reply."""
        self.cancel()
        self._tell(finish)
        if self._streams:
            self._connection.chunk(_DONE, last=True)

    def cancel(self) -> None:
        """No token more."""
        if self._timer is not None:
            self._timer.cancel()
        self._engine.running.pop(self.rid, None)


class Engine:
    """What all connections share."""

    def __init__(self, tokens: list[int], token_s: float, *, incremental: bool) -> None:
        self.tokens, self.token_s, self.incremental = tokens, token_s, incremental
        self.version = "v0"
        self.running: dict[str, Reply] = {}
        self.first: dict[str, float] = {}

    def answer(self, path: str, body: dict[str, Any]) -> object:
        """Everything but `/generate`."""
        match path:
            case "/abort_request":
                for rid in [body["rid"]] if body.get("rid") else list(self.running):
                    if rid in self.running:
                        self.running[rid].end({"type": "abort", "message": "aborted"})
            case "/update_weights_from_disk":
                self.version = body["weight_version"]
                return {"success": True, "message": "ok"}
            case "/running":
                return {"running": len(self.running)}
            case "/clock":
                first, self.first = self.first, {}
                return first
            case "/model_info" | "/server_info":
                return {
                    "weight_version": self.version, "model_path": "", "vocab_size": VOCABULARY, "context_length": WINDOW,
                }  # fmt: skip
        return {}


class Connection(asyncio.Protocol):
    """HTTP of one client; requests do not overlap."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._body = b"", b""
        self._reply: Reply | None = None
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reply is not None:
            self._reply.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        """A parser's call."""
        self._path, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        """A parser's call."""
        self._body += body

    def on_message_complete(self) -> None:
        """A parser's call."""
        body = orjson.loads(self._body) if self._body else {}
        path = self._path.decode()
        if path == "/generate":
            if body.get("stream"):
                self._transport.write(_EVENTS)
            self._reply = self._engine.running[body["rid"]] = Reply(self._engine, self, body)
            self._reply.start()
            return
        self.whole(orjson.dumps(self._engine.answer(path, body)))

    def whole(self, raw: bytes) -> None:
        """A body of JSON."""
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (len(raw), raw)
        )

    def chunk(self, data: bytes, *, last: bool = False) -> None:
        """One chunk of a chunked body."""
        end = b"0\r\n\r\n" if last else b""
        self._transport.write(b"%x\r\n%s\r\n%s" % (len(data), data, end))


async def serve(port: int, engine: Engine) -> None:
    """Until killed."""
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    port, tokens, token_ms, mode = sys.argv[1:]
    numbers = orjson.loads(Path(tokens).read_bytes())
    uvloop.run(serve(int(port), Engine(numbers, float(token_ms) / 1000, incremental=mode == "incremental")))
