"""How a session ends: finalized, discarded, expired, with its last request; and what the log has of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from proxy_rig import log_of, running_proxy, settings_for, until
from scripted_engine import ScriptedEngine

from schemas.events import RewardAssigned, TokenSegment, TrajectoryEnded, TrajectoryStarted
from schemas.settings import Settings
from schemas.topics import SEGMENTS

pytestmark = pytest.mark.broker


async def segments(settings: Settings) -> list[TokenSegment]:
    return await asyncio.to_thread(log_of, settings, SEGMENTS, TokenSegment)


async def end_events(settings: Settings) -> list[TrajectoryEnded]:
    return await asyncio.to_thread(log_of, settings, SEGMENTS, TrajectoryEnded)


async def test_finalize_is_idempotent_and_closes(broker: str, tmp_path: Path, engine: ScriptedEngine) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        finalize = opened["base_url"] + "/session/finalize"
        status, reply = await proxy.post(finalize, {"reward": 1.0})
        assert (status, reply["error"]["field"]) == (400, "session_id")  # no steps
        await proxy.generate(opened, [1])
        first = await proxy.post("/session/finalize", {"session_id": opened["session_id"], "reward": 0.5})
        again = await proxy.post(finalize, {"reward": 0.7, "status": "failed"})
        assert first == again
        assert first[1]["segment_count"] == 1
        status, reply = await proxy.generate(opened, [1])
        assert (status, reply["error"]["code"]) == (409, "trajectory_closed")
    (end,) = await end_events(settings)
    assert (end.end.reward, end.end.status, end.end.segment_count) == (0.5, "completed", 1)


async def test_what_shall_be_trained_on_does_not_end_without_a_reward(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        status, reply = await proxy.generate(opened, [1], final=True)
        assert (status, reply["error"]["field"]) == (400, "end.reward")
        await proxy.generate(opened, [1])
        finalize = opened["base_url"] + "/session/finalize"
        for status_of_it in ("completed", "truncated"):
            status, reply = await proxy.post(finalize, {"status": status_of_it})
            assert (status, reply["error"]["field"]) == (400, "reward")
        assert (await proxy.post(finalize, {"reward_pending": True}))[0] == 200
        judged = await proxy.open(sample=1, kind="eval")
        await proxy.generate(judged, [1])
        assert (await proxy.post(judged["base_url"] + "/session/finalize", {}))[0] == 200


async def test_finalize_aborts_what_is_in_flight(broker: str, tmp_path: Path, engine: ScriptedEngine) -> None:
    engine.held_at = 2
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        call = asyncio.ensure_future(proxy.generate(opened, [1], 50))
        await until(lambda: engine.running, "the engine call")
        status, _ = await proxy.post(
            opened["base_url"] + "/session/finalize", {"status": "failed", "reason": "timeout"}
        )
        assert status == 200
        status, reply = await call
        assert (status, reply["error"]["code"]) == (409, "trajectory_closed")
        await until(lambda: not engine.running, "the engine's abort")
    assert await segments(settings) == []


async def test_a_final_request_carries_the_end_in_its_segment(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        end = {"status": "completed", "reason": "solved", "reward": 2.0, "components": {"a": 1}}
        status, _ = await proxy.generate(opened, [1], final=True, end=end)
        assert status == 200
        status, _ = await proxy.generate(opened, [1])
        assert status == 409
    (segment,) = await segments(settings)
    assert segment.started
    assert segment.end is not None
    assert (segment.end.segment_count, segment.end.reward, segment.end.reason) == (1, 2.0, "solved")


async def test_rewards_discards_and_starts_are_recorded(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open(instance_id="task-7", attributes={"k": 1})
        await proxy.generate(opened, [1])
        await proxy.post(opened["base_url"] + "/session/finalize", {"reward_pending": True})
        status, _ = await proxy.post(opened["base_url"] + "/session/reward", {"reward": 0.25})
        assert status == 200
        other = await proxy.open(sample=1)
        for _ in range(2):
            status, reply = await proxy.post(other["base_url"] + "/session/discard", {})
            assert (status, reply["discarded"]) == (200, True)
        status, _ = await proxy.generate(other, [1])
        assert status == 410
    events = await asyncio.to_thread(log_of, settings, SEGMENTS)
    (start,) = [e for e in events if isinstance(e, TrajectoryStarted)]
    (reward,) = [e for e in events if isinstance(e, RewardAssigned)]
    assert (start.instance_id, start.attributes) == ("task-7", '{"k":1}')
    assert (reward.reward, reward.parent_traj_id) == (0.25, opened["parent_traj_id"])
    assert reward.epoch == start.epoch


async def test_an_idle_session_expires_and_stays_gone(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url], proxy={"session_idle_s": 0.2})
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        await proxy.generate(opened, [1])
        await until(lambda: not proxy.parts.table.open, "the expiry")
        status, reply = await proxy.generate(opened, [1])
        assert (status, reply["error"]["code"]) == (410, "trajectory_gone")
    (end,) = await end_events(settings)
    assert (end.end.status, end.end.reason, end.end.segment_count) == ("failed", "expired", 1)
