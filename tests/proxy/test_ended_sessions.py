"""What an ended session leaves in memory."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from proxy_rig import Proxy, running_proxy, settings_for
from scripted_engine import ScriptedEngine

from proxy.sessions import Session


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def three_turns(proxy: Proxy, sample: int, *, stream: bool) -> weakref.ref[Session]:
    opened, ids = await proxy.open(sample=sample), [1, 2, 3]
    for _ in range(3):
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 5}, "stream": stream}
        async with proxy.http.post(opened["base_url"] + "/generate", json=body) as reply:
            assert reply.status == 200
            await reply.read()
        ids = [*ids, 9]
    session = weakref.ref(proxy.parts.access.table.open[opened["session_id"]])
    status, _ = await proxy.post(
        opened["base_url"] + "/session/finalize", {"status": "completed", "reward": 1.0}
    )
    assert status == 200
    return session


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_ended_session_is_gone_at_once_and_waits_for_no_collector(
    broker: str, tmp_path: Path, engine: ScriptedEngine, stream: bool
) -> None:
    async with running_proxy(settings_for(broker, tmp_path, [engine.url])) as proxy:
        sessions = [await three_turns(proxy, sample, stream=stream) for sample in range(5)]
        for _ in range(200):
            if not any(session() for session in sessions):
                break
            await asyncio.sleep(0.01)
        assert [session() for session in sessions] == [None] * 5
