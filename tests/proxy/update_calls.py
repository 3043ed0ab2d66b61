"""What the tests of weight updates ask of a proxy, and read of its log."""

from __future__ import annotations

import asyncio
from typing import Any

from proxy_rig import Proxy, log_of

from schemas.settings import Settings


async def update(proxy: Proxy, version: Any, **more: Any) -> tuple[int, dict[str, Any]]:
    body = {"version": version, "checkpoint_uri": f"/checkpoints/{version}", **more}
    return await proxy.post("/v1/policy/versions", body)


async def read(settings: Settings, topic: Any, kind: Any) -> list[Any]:
    return await asyncio.to_thread(log_of, settings, topic, kind)


async def get(proxy: Proxy, path: str) -> Any:
    async with proxy.http.get(proxy.base + path) as reply:
        assert reply.status == 200
        return await reply.json()


async def states(proxy: Proxy) -> dict[str, str]:
    """State by engine."""
    return {e["engine_id"]: e["state"] for e in (await get(proxy, "/v1/engines"))["engines"]}
