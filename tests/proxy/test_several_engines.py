"""Weight updates at several engines, of which some fail or hang: the others go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from proxy_rig import Proxy, running_proxy, settings_for, until
from scripted_engine import ScriptedEngine, token_at
from update_calls import both_up, get, name, publish, read, update, versions_served

from schemas.events import PolicyActivated
from schemas.topics import CONTROL

pytestmark = pytest.mark.broker

SHORT: dict[str, Any] = {"update_timeout_s": 0.3, "quiesce_timeout_s": 0.3}


async def running_at(proxy: Proxy, engine: ScriptedEngine, other: ScriptedEngine) -> Any:
    """A generation that is held at this engine."""
    other.held_at = None
    engine.held_at = 2
    proxy.parts.registry.find(name(other)).draining = True  # type: ignore[union-attr]
    call = asyncio.ensure_future(proxy.generate(await proxy.open("held"), [1], 6))
    await until(lambda: engine.running and engine.holds, "the engine call")
    proxy.parts.registry.find(name(other)).draining = False  # type: ignore[union-attr]
    return call


@pytest.mark.parametrize("fault", ["fails", "hangs"])
async def test_a_broken_engine_holds_up_no_update_of_the_others(
    broker: str, tmp_path: Path, engine: ScriptedEngine, second_engine: ScriptedEngine, fault: str
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url, second_engine.url], proxy=SHORT)
    async with running_proxy(settings) as proxy:
        await both_up(proxy)
        second_engine.fails_updates = fault == "fails"
        second_engine.hangs = {"/update_weights_from_disk"} if fault == "hangs" else set()
        for version in ("v2", "v3", "v4"):
            status, outcome = await update(proxy, version)
            assert (status, outcome["activated"]) == (200, [name(engine)])
            assert await versions_served(proxy, 2) == {version}
            if fault == "hangs":  # the next update finds its catch-up in the middle of a try
                catching_up = proxy.parts.registry.find(name(second_engine))
                assert catching_up is not None
                await until(catching_up.changing.locked, "a try of the catch-up")
        assert engine.updates == ["v2", "v3", "v4"]
        failures = {
            e["engine_id"]: e["catch_up_failures"] for e in (await get(proxy, "/v1/engines"))["engines"]
        }
        assert failures[name(engine)] == 0
        second_engine.fails_updates, second_engine.hangs = False, set()
        await both_up(proxy)
    assert second_engine.updates[-1] == "v4"


async def test_an_update_does_not_wait_for_the_catch_up_of_another_engine(
    broker: str, tmp_path: Path, engine: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    settings = settings_for(
        broker, tmp_path, [engine.url, second_engine.url], proxy={"update_timeout_s": 3600}
    )
    async with running_proxy(settings) as proxy:
        await both_up(proxy)
        second_engine.fails_updates, second_engine.hangs = True, set()
        assert (await update(proxy, "v2"))[1]["activated"] == [name(engine)]
        second_engine.hangs = {"/update_weights_from_disk"}
        behind = proxy.parts.registry.find(name(second_engine))
        assert behind is not None
        await until(behind.changing.locked, "a try of the catch-up, which now hangs")
        await until(lambda: not behind.in_rotation and behind.changing.locked(), "it")
        assert (await update(proxy, "v3"))[1]["activated"] == [name(engine)]
        assert behind.changing.locked()
        assert await versions_served(proxy, 2) == {"v3"}


async def test_an_engine_that_neither_aborts_nor_answers_is_left_out_and_its_generation_goes_on_elsewhere(
    broker: str, tmp_path: Path, engine: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url, second_engine.url], proxy=SHORT)
    async with running_proxy(settings) as proxy:
        await both_up(proxy)
        call = await running_at(proxy, second_engine, engine)
        second_engine.hangs = {"/abort_request", "/update_weights_from_disk", "/model_info", "/generate"}
        status, outcome = await update(proxy, "v2")
        assert (status, outcome["activated"], outcome["quiesced"]) == (200, [name(engine)], False)
        assert (list(outcome["failed"]), len(outcome["running"])) == ([name(second_engine)], 1)
        status, reply = await call
    assert (status, reply["output_ids"]) == (200, [token_at(1 + i) for i in range(6)])
    assert reply["meta_info"]["weight_versions"] == [
        {"version": "v1", "start": 0, "end": 2}, {"version": "v2", "start": 2, "end": 6},
    ]  # fmt: skip


async def test_preempted_counts_what_was_cut_at_each_engine(
    broker: str, tmp_path: Path, engine: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url, second_engine.url])
    async with running_proxy(settings) as proxy:
        await both_up(proxy)
        call = await running_at(proxy, second_engine, engine)
        second_engine.held_at = None
        _, outcome = await update(proxy, "v2")
        assert outcome["preempted"] == 1
        await call
    activated = await read(settings, CONTROL, PolicyActivated)
    assert {a.engine_id: a.preempted for a in activated} == {name(engine): 0, name(second_engine): 1}


@pytest.mark.parametrize("stays", ["/pause_generation", "/continue_generation"])
@pytest.mark.parametrize("fault", ["hangs", "breaks"])
async def test_retract_an_engine_that_does_not_pause_or_go_on_is_left_out(
    broker: str, tmp_path: Path, engine: ScriptedEngine, second_engine: ScriptedEngine, stays: str, fault: str
) -> None:
    proxied = {**SHORT, "update_strategy": "retract"}
    settings = settings_for(broker, tmp_path, [engine.url, second_engine.url], proxy=proxied)
    async with running_proxy(settings) as proxy:
        await both_up(proxy)
        call = await running_at(proxy, second_engine, engine)
        setattr(second_engine, fault, {stays})
        status, outcome = await update(proxy, "v2")
        assert (status, outcome["activated"]) == (200, [name(engine)])
        _, reply = await call  # it goes on at the other
        assert reply["output_ids"] == [token_at(1 + i) for i in range(6)]
        setattr(second_engine, fault, set())
        await both_up(proxy)
        assert not second_engine.paused
    assert second_engine.version == "v2"


async def test_if_all_take_too_long_the_answer_is_503_and_they_come_back(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.hangs = {"/update_weights_from_disk"}
    settings = settings_for(broker, tmp_path, [engine.url], proxy=SHORT)
    async with running_proxy(settings) as proxy:
        status, reply = await update(proxy, "v2")
        assert (status, reply["error"]["code"]) == (503, "engine_unavailable")
        engine.hangs = set()
        await until(lambda: proxy.parts.registry.usable, "its return")
        assert await versions_served(proxy, 1) == {"v1"}  # it has no place in the log: the caller asks again
        assert (await update(proxy, "v2"))[0] == 200
        assert await versions_served(proxy, 1) == {"v2"}


async def test_if_all_take_too_long_a_version_of_the_trainer_s_is_made_up_for(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.hangs = {"/update_weights_from_disk"}
    settings = settings_for(broker, tmp_path, [engine.url], proxy=SHORT)
    async with running_proxy(settings) as proxy:
        await publish(settings, "v2")
        await until(lambda: "v2" in proxy.parts.control.published, "the trainer's word")
        assert (await update(proxy, "v2"))[0] == 503
        engine.hangs = set()
        await until(lambda: proxy.parts.registry.usable, "its return")
        assert await versions_served(proxy, 1) == {"v2"}
