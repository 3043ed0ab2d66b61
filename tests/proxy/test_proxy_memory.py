"""Nothing is kept for a session that has ended but a tombstone, and of those a bounded number."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from proxy_rig import Proxy, running_proxy, settings_for
from scripted_engine import ScriptedEngine

from proxy import sessions
from proxy.generation import Generation
from proxy.ownership import Holding
from proxy.routing import Lineage, Step
from proxy.sessions import Ended, Session
from proxy.turn import Turn

pytestmark = pytest.mark.broker

_KINDS = (Session, Generation, Turn, Lineage, Step, Holding, Ended)
_AT_A_TIME = 50
_TOMBSTONES = 100


def alive() -> Counter[str]:
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, _KINDS))


def held() -> int:
    """Bytes that code of the proxy has asked for and that are still there."""
    gc.collect()
    ours = tracemalloc.Filter(True, str(Path(sessions.__file__).parent / "*"))
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([ours]).traces)


async def live_and_die(proxy: Proxy, number: int) -> None:
    """Opened, a turn, and an end in one of the ways there are."""
    opened = await proxy.open(group=f"g{number}")
    end = {"final": True, "end": {"reward": 1.0}} if number % 3 == 0 else {}
    status, _ = await proxy.generate(opened, [1, 2, 3], 3, **end)
    assert status == 200
    if number % 3 == 1:
        assert (await proxy.post(opened["base_url"] + "/session/finalize", {"reward": 1.0}))[0] == 200
    if number % 3 == 2:
        assert (await proxy.post(opened["base_url"] + "/session/discard", {}))[0] == 200


async def rounds(proxy: Proxy, first: int, count: int) -> None:
    for start in range(first, first + count, _AT_A_TIME):
        await asyncio.gather(*(live_and_die(proxy, start + i) for i in range(_AT_A_TIME)))


async def test_ended_sessions_leave_no_more_than_their_tombstones(
    broker: str, tmp_path: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_KEPT_ENDS", _TOMBSTONES)
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        await rounds(proxy, 0, 200)  # caches, pools and metrics have their size now
        before = alive()
        tracemalloc.start()
        try:
            await rounds(proxy, 200, 100)
            at_first = held()
            await rounds(proxy, 300, 300)
            grown = held() - at_first
        finally:
            tracemalloc.stop()
        await rounds(proxy, 600, 1400)
        after = alive()
        assert len(proxy.parts.access.table.ended) == _TOMBSTONES
        assert after <= before, after - before  # what tests before this one left behind is not ours
        assert not proxy.parts.access._turnstiles
        assert not proxy.parts.ownership._held
        assert all(not frontier._own for frontier in proxy.parts.ownership._frontiers.values())
        assert grown < 300 * 200, grown  # bytes; a session that is open holds thousands
