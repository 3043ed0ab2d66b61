"""An engine that does as it is told: SGLang's shapes, controllable pace, abort, versions, death.

The token at absolute position p is `token_at(p)`, whatever the prompt is, so a continuation can be checked by position.
`script(prompt_length)` may say where it stops by itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

VOCABULARY = 1000
WINDOW = 4096


def token_at(position: int) -> int:
    return (7 * position + 3) % VOCABULARY


@dataclass
class ScriptedEngine:
    version: str = "v1"
    delay_s: float = 0.0
    incremental: bool = False
    obeys_aborts: bool = True
    fails_updates: bool = False
    die_after: int | None = None
    stop_after: int | None = None
    held_at: int | None = None
    vocabulary: int = VOCABULARY
    holds: int = 0
    """How often it has stopped at `held_at`."""
    tokens: Callable[[list[int]], list[int]] | None = None
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    updates: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    paused: bool = False
    hangs: set[str] = field(default_factory=set)
    """Endpoints that take a request and never answer."""
    breaks: set[str] = field(default_factory=set)
    """Endpoints that answer 500 and do nothing."""
    model_path: str = "scripted"
    unloadable: set[str] = field(default_factory=set)
    """Versions whose checkpoint it refuses."""
    matched: str | None = None
    """The stop string that the script ends with; else its last token is what matched."""
    window: int = WINDOW
    refuses: str = "foo"
    text_of: Callable[[list[int]], str] | None = None
    late_finish: bool = False
    """The last token of the budget is out, but its end is not: an abort arrives first."""
    finish_in_abort: bool = False
    """What a running request says when an abort arrives: `stop`, as if it had just ended by itself."""

    def __post_init__(self) -> None:
        self.go = asyncio.Event()
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> str:
        app = web.Application(middlewares=[self._hang])
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.post("/update_weights_from_disk", self._update),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.get("/model_info", self._info),
                web.get("/server_info", self._info),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        assert site._server is not None
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        return self.url

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _hang(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path in self.hangs:
            await asyncio.Event().wait()
        if request.path in self.breaks:
            return web.Response(status=500, text="broken")
        reply: web.StreamResponse = await handler(request)
        return reply

    async def restart(self, version: str = "default") -> None:
        """Die, and come back at the same address with the weights of the start."""
        await self.stop()
        self.version, self.model_path, self.paused = version, "scripted", False
        self.running = {}
        await self.start(int(self.url.rpartition(":")[2]))

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "weight_version": self.version,
                "model_path": self.model_path,
                "vocab_size": self.vocabulary,
                "context_length": self.window,
                "tokenizer_path": None,
            }
        )

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json()).get("rid")
        self.aborted.append(rid)
        if self.obeys_aborts and rid in self.running:
            self.running[rid].set()
        return web.Response()

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("abort_all_requests"):
            for abort in self.running.values():
                abort.set()
        if self.fails_updates or body["weight_version"] in self.unloadable:
            return web.json_response({"success": False, "message": "no such checkpoint"}, status=400)
        self.version, self.model_path = body["weight_version"], body["model_path"]
        self.updates.append(self.version)
        return web.json_response({"success": True, "message": "ok"})

    async def _pause(self, _: web.Request) -> web.Response:
        self.paused = True
        return web.json_response({"status": "ok"})

    async def _continue(self, _: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({"status": "ok"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.refuses in body["sampling_params"]:
            return web.json_response(
                {"error": f"unknown field `{self.refuses}`, expected one of …"}, status=400
            )
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        abort = self.running[body["rid"]] = asyncio.Event()
        try:
            await self._stream(body, reply, abort)
        finally:
            del self.running[body["rid"]]
        return reply

    async def _stream(self, body: dict[str, Any], reply: web.StreamResponse, abort: asyncio.Event) -> None:
        prompt, limit = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        wanted = self.tokens(prompt) if self.tokens else None
        ids: list[int] = []
        spans: list[dict[str, Any]] = []
        finish: dict[str, Any] | None = None
        while finish is None:
            if self.held_at == len(ids) and not self.go.is_set():
                self.holds += 1
                await asyncio.wait(
                    [asyncio.ensure_future(abort.wait()), asyncio.ensure_future(self.go.wait())],
                    return_when=asyncio.FIRST_COMPLETED,
                )
            if abort.is_set():
                finish = (
                    {"type": "stop", "matched": 0}
                    if self.finish_in_abort
                    else {"type": "abort", "message": "Aborted"}
                )
                break
            if self.delay_s:
                try:
                    await asyncio.wait_for(abort.wait(), self.delay_s)
                    continue
                except TimeoutError:
                    pass
            if self.die_after is not None and len(ids) >= self.die_after:
                assert reply._req is not None
                assert reply._req.transport is not None
                reply._req.transport.abort()
                return
            at = len(ids)
            ids.append(wanted[at] if wanted is not None else token_at(len(prompt) + at))
            if spans and spans[-1]["version"] == self.version:
                spans[-1]["end"] = at + 1
            else:
                spans.append({"version": self.version, "start": at, "end": at + 1})
            if (wanted is not None and len(ids) == len(wanted)) or self.stop_after == len(ids):
                finish = {"type": "stop", "matched": self.matched or ids[-1]}
            elif len(ids) >= limit and self.late_finish:
                await self._event(reply, body, ids, None, None)
                await abort.wait()
            elif len(ids) >= limit:
                finish = {"type": "length", "length": len(ids)}
            else:
                await self._event(reply, body, ids, None, None)
        await self._event(reply, body, ids, finish, spans)
        await reply.write(b"data: [DONE]\n\n")

    async def _event(
        self, reply: web.StreamResponse, body: dict[str, Any], ids: list[int], finish: Any, spans: Any
    ) -> None:
        sent = getattr(reply, "_sent_tokens", 0)
        first = sent if self.incremental else 0
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self.version,
            "output_token_logprobs": [[-0.001 * t, t, None] for t in ids[first:]],
            "output_token_logprobs_length": len(ids),
        }
        if spans is not None:
            meta["weight_versions"] = spans or [{"version": self.version, "start": 0, "end": 0}]
        reply._sent_tokens = len(ids)  # type: ignore[attr-defined]
        text = self.text_of(ids) if self.text_of else ""
        event = {"text": text, "output_ids": ids[first:], "meta_info": meta}
        await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")
