"""What the tests of weight updates ask of a proxy, and read of its log."""

from __future__ import annotations

import asyncio
from typing import Any

from proxy_rig import Proxy, log_of, until
from scripted_engine import ScriptedEngine

from journal.producer import AckProducer
from schemas.events import PolicyPublished, identified
from schemas.settings import Settings


async def update(proxy: Proxy, version: Any, **more: Any) -> tuple[int, dict[str, Any]]:
    body = {"version": version, "checkpoint_uri": f"/checkpoints/{version}", **more}
    return await proxy.post("/v1/policy/versions", body)


async def read(settings: Settings, topic: Any, kind: Any) -> list[Any]:
    return await asyncio.to_thread(log_of, settings, topic, kind)


async def publish(settings: Settings, version: str) -> None:
    """As the trainer does before it asks for the update."""
    event = identified(
        PolicyPublished(
            run_id=settings.run.run_id,
            occurred_at=1,
            version=version,
            checkpoint_uri=f"/checkpoints/{version}",
            step=1,
        )
    )
    producer = AckProducer(settings.kafka, "trainer")
    await asyncio.to_thread(producer.publish, event)
    await asyncio.to_thread(producer.close)


async def get(proxy: Proxy, path: str) -> Any:
    async with proxy.http.get(proxy.base + path) as reply:
        assert reply.status == 200
        return await reply.json()


async def states(proxy: Proxy) -> dict[str, str]:
    """State by engine."""
    return {e["engine_id"]: e["state"] for e in (await get(proxy, "/v1/engines"))["engines"]}


def name(engine: ScriptedEngine) -> str:
    return engine.url.removeprefix("http://")


async def nobody_looks(_engine: object) -> None:
    """In the place of the watch."""


async def both_up(proxy: Proxy) -> None:
    await until(lambda: len(proxy.parts.registry.usable) == 2, "both engines")


async def versions_served(proxy: Proxy, count: int = 4) -> set[str]:
    """Versions that new sessions get."""
    seen: set[str] = set()
    for sample in range(count):
        status, reply = await proxy.generate(await proxy.open(sample=sample), [1], 2)
        assert status == 200, reply
        seen |= set(reply["meta_info"]["hoofprint"]["versions"])
    return seen


async def cut_once(proxy: Proxy, engine: ScriptedEngine, work: Any) -> Any:
    """Preempt a generation where the engine holds it, and let it go on."""
    running = asyncio.ensure_future(work)
    await until(lambda: engine.holds, "the seam")
    assert (await proxy.post("/v1/rollout/pause", {}))[1]["quiesced"]
    engine.held_at = None
    assert (await proxy.post("/v1/rollout/resume", {}))[0] == 200
    return await running
