"""`/v1/rollout/pause` and `/resume`: of everything, and of one session alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from proxy_rig import PATIENCE_S, Proxy, running_proxy, settings_for, until
from scripted_engine import ScriptedEngine, token_at
from update_calls import get

from proxy.ownership import Holding
from proxy.sessions import Identity, Session, SessionTable

pytestmark = pytest.mark.broker


async def pause(proxy: Proxy, session_id: Any = None, **more: Any) -> tuple[int, dict[str, Any]]:
    return await proxy.post("/v1/rollout/pause", {"session_id": session_id, **more})


async def resume(proxy: Proxy, session_id: Any = None) -> tuple[int, dict[str, Any]]:
    return await proxy.post("/v1/rollout/resume", {"session_id": session_id})


async def test_a_pause_of_one_session_touches_no_other(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.delay_s = 0.01
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        one, other = await proxy.open(sample=0), await proxy.open(sample=1)
        paused = asyncio.ensure_future(proxy.generate(one, [1], 40))
        free = asyncio.ensure_future(proxy.generate(other, [1, 2], 60))
        await until(lambda: len(engine.running) == 2, "both calls")
        _, reply = await pause(proxy, one["session_id"])
        assert (reply["quiesced"], reply["running"]) == (True, [])
        later = asyncio.ensure_future(proxy.generate(one, [7], 3))
        await until(lambda: proxy.parts.gate.waiting == 2, "its calls at the gate")
        status, whole = await free
        assert (status, whole["meta_info"]["hoofprint"]["preemptions"]) == (200, 0)
        assert not paused.done()
        assert (await get(proxy, "/v1/rollout/pause_state"))["sessions"] == [one["session_id"]]
        assert (await resume(proxy, one["session_id"]))[0] == 200
        _, reply = await paused
        assert (await later)[0] == 200
    assert reply["output_ids"] == [token_at(1 + i) for i in range(40)]
    assert len([body for body in engine.bodies if body["input_ids"][:2] == [1, 2]]) == 1
    assert len(engine.aborted) == 1


async def test_a_paused_session_stays_paused_when_everything_is_paused_and_resumed(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        one, other = await proxy.open(sample=0), await proxy.open(sample=1)
        await pause(proxy, one["session_id"])
        await pause(proxy)
        calls = [asyncio.ensure_future(proxy.generate(s, [1], 2)) for s in (one, other)]
        await until(lambda: proxy.parts.gate.waiting == 2, "both at the gate")
        await resume(proxy)
        assert (await calls[1])[0] == 200
        assert (proxy.parts.gate.waiting, calls[0].done()) == (1, False)
        await resume(proxy, one["session_id"])
        assert (await calls[0])[0] == 200


async def test_a_full_pause_holds_a_session_that_is_resumed_alone(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        one = await proxy.open()
        await pause(proxy, one["session_id"])
        await pause(proxy)
        call = asyncio.ensure_future(proxy.generate(one, [1], 2))
        await until(lambda: proxy.parts.gate.waiting == 1, "it at the gate")
        await resume(proxy, one["session_id"])
        assert proxy.parts.gate.waiting == 1
        assert engine.bodies == []
        await resume(proxy)
        assert (await call)[0] == 200


@pytest.mark.parametrize("ends", ["finalize", "discard", "anew"])
async def test_a_session_that_ends_while_it_is_paused_leaves_nothing(
    broker: str, tmp_path: Path, engine: ScriptedEngine, ends: str
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        one = await proxy.open()
        assert (await proxy.generate(one, [1], 2))[0] == 200
        await pause(proxy, one["session_id"])
        call = asyncio.ensure_future(proxy.generate(one, [1], 2))
        await until(lambda: proxy.parts.gate.waiting == 1, "it at the gate")
        if ends == "anew":
            again = await proxy.open()
            assert (await proxy.generate(again, [1], 2))[0] == 200  # the new try was not paused
        else:
            assert (await proxy.post(one["base_url"] + f"/session/{ends}", {"reward": 1.0}))[0] == 200
        assert (await call)[0] == (409 if ends == "finalize" else 410)
        assert (proxy.parts.gate.sessions, proxy.parts.gate.waiting) == ([], 0)


async def test_names_of_ended_sessions_are_not_kept(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        for sample in range(20):
            opened = await proxy.open(sample=sample)
            await pause(proxy, opened["session_id"])
            await proxy.post(opened["base_url"] + "/session/discard", {})
        assert proxy.parts.gate.sessions == []


async def test_only_an_open_session_can_be_paused_or_resumed(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        ended = await proxy.open()
        await proxy.post(ended["base_url"] + "/session/discard", {})
        answers = [
            await pause(proxy, "nobody"), await resume(proxy, "nobody"), await pause(proxy, ended["session_id"]),
            await pause(proxy, 7), await pause(proxy, ["x"]), await resume(proxy, {}),
        ]  # fmt: skip
        assert [(status, reply["error"]["code"]) for status, reply in answers] == [
            (404, "unknown_session"), (404, "unknown_session"), (404, "unknown_session"),
            (400, "invalid_request"), (400, "invalid_request"), (400, "invalid_request"),
        ]  # fmt: skip
        assert answers[2][1]["error"]["session_id"] == ended["session_id"]
        assert (await resume(proxy, (await proxy.open(sample=3))["session_id"]))[0] == 200  # it runs already
        assert proxy.parts.gate.sessions == []


async def test_what_does_not_end_in_time_is_named_and_the_pause_holds(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.held_at, engine.hangs = 2, {"/abort_request"}
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        one = await proxy.open()
        call = asyncio.ensure_future(proxy.generate(one, [1], 5))
        await until(lambda: engine.holds, "the call")
        _, reply = await pause(proxy, one["session_id"], timeout_seconds=0.2)
        assert (reply["quiesced"], reply["running"]) == (False, list(engine.running))
        engine.go.set()
        assert (await call)[0] == 200
        await resume(proxy, one["session_id"])


async def test_a_pause_ends_when_another_proxy_takes_the_session(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as one, running_proxy(settings) as two:
        opened, neighbour = await one.open(sample=0), await one.open(sample=1)
        assert (await pause(one, opened["session_id"]))[0] == 200
        held = asyncio.ensure_future(one.generate(opened, [1], 2))
        await until(lambda: one.parts.gate.waiting, "the call at the gate")
        there = {**opened, "base_url": opened["base_url"].replace(one.base, two.base)}
        assert (await two.generate(there, [1, 2, 3], 2))[0] == 200
        # the neighbour has the same partition: its record shows that somebody else writes there
        assert (await one.generate(neighbour, [1], 2))[0] == 200
        assert (await asyncio.wait_for(held, PATIENCE_S))[0] == 200
        assert (await get(one, "/v1/rollout/pause_state"))["sessions"] == []


@pytest.mark.parametrize("lost", [True, False])
def test_what_a_proxy_forgets_on_its_own_stays_paused(lost: bool) -> None:
    released: list[str] = []
    table = SessionTable(released.append)
    session = Session(Identity("s", "t", "free"), Holding("s", 1), "", 0)
    table.add(session)
    if lost:
        session.holding.end(7)
    table.forget(session)
    assert released == (["s"] if lost else [])
