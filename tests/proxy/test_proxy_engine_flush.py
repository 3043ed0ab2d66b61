"""An engine that took the weights but could not forget its old keys goes on only when it has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from proxy import engines
from proxy.engines import Engine, engine_http
from schemas.errors import EngineUnavailable

NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued."
)


class Busy:
    """SGLang while requests run whose clients have gone: it cannot flush `left` times, and keeps the old label until an
    update goes through."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.calls: list[str] = []
        self.label = "v1"

    async def handle(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        match request.path:
            case "/update_weights_from_disk" if self.left:
                return web.json_response({"success": False, "message": NOT_FLUSHED}, status=400)
            case "/update_weights_from_disk":
                self.label = (await request.json())["weight_version"]
                return web.json_response({"success": True, "message": "ok"})
            case "/flush_cache":
                self.left -= 1
                return web.Response(status=400 if self.left else 200)
            case "/model_info":
                return web.json_response(
                    {"weight_version": self.label, "vocab_size": 32, "context_length": 512}
                )
        return web.Response()


@asynccontextmanager
async def serving(busy: Busy) -> AsyncIterator[Engine]:
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", busy.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with engine_http() as http:
            yield Engine(f"http://127.0.0.1:{port}", http, timeout_s=10)
    finally:
        await runner.cleanup()


async def test_it_is_flushed_until_it_succeeds_and_updated_again() -> None:
    busy = Busy(left=3)
    async with serving(busy) as engine:
        await engine.update_weights("/somewhere", "v2")
        assert engine.version == "v2"
    control = [call for call in busy.calls if call not in ("/model_info", "/server_info")]
    assert control == [
        "/update_weights_from_disk", "/abort_request", "/flush_cache", "/flush_cache", "/flush_cache",
        "/update_weights_from_disk",
    ]  # fmt: skip


async def test_one_that_never_can_has_not_got_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_FLUSH_S", 0.2)
    async with serving(Busy(left=-1)) as engine:
        with pytest.raises(EngineUnavailable, match="keeps its old cache"):
            await engine.update_weights("/somewhere", "v2")
