"""A proxy that dies in the middle of a weight update leaves no engine paused, and the update is brought to its end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from proxy_process import ProxyProcess, free_port
from proxy_rig import settings_for, until
from scripted_engine import ScriptedEngine
from update_calls import publish, read

from schemas.events import PolicyActivated, PolicyPublished
from schemas.topics import CONTROL

pytestmark = pytest.mark.broker


async def begin_update(http: aiohttp.ClientSession, base: str) -> None:
    body = {"version": "v2", "checkpoint_uri": "/checkpoints/v2"}
    async with http.post(f"{base}/v1/policy/versions", json=body) as reply:
        await reply.read()


@pytest.mark.parametrize("end", ["kill", "stop"])
async def test_it_leaves_no_engine_paused(
    broker: str, tmp_path: Path, engine: ScriptedEngine, end: str
) -> None:
    proxied: dict[str, Any] = {"port": free_port(), "update_strategy": "retract"}
    settings = settings_for(broker, tmp_path, [engine.url], proxy=proxied)
    proxy = ProxyProcess(settings, tmp_path)
    await asyncio.to_thread(proxy.start)
    await publish(settings, "v2")
    engine.hangs = {"/update_weights_from_disk"}
    async with aiohttp.ClientSession() as http:
        updating = asyncio.ensure_future(begin_update(http, proxy.base))
        await until(lambda: engine.paused, "the pause")
        await asyncio.to_thread(getattr(proxy, end))
        await asyncio.gather(updating, return_exceptions=True)
        assert engine.paused == (end == "kill")  # an orderly end lets the engine go on itself
        engine.hangs = set()
        await asyncio.to_thread(proxy.start)
        assert (engine.paused, engine.updates) == (False, ["v2"])
        await asyncio.to_thread(proxy.stop)
    assert [e.version for e in await read(settings, CONTROL, PolicyPublished)] == ["v2"]
    assert [e.version for e in await read(settings, CONTROL, PolicyActivated)] == ["v2"]
