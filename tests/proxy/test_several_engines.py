"""Weight updates at several engines, of which some fail, hang, come late or start anew: the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from proxy_process import free_port
from proxy_rig import Proxy, running_proxy, settings_for, until
from scripted_engine import ScriptedEngine, token_at
from update_calls import get, read, states, update

from schemas.errors import HoofprintError
from schemas.events import PolicyActivated
from schemas.settings import Settings
from schemas.topics import CONTROL

pytestmark = pytest.mark.broker

SHORT: dict[str, Any] = {"update_timeout_s": 0.3, "quiesce_timeout_s": 0.3}


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


async def served_while(proxy: Proxy, condition: Callable[[], bool]) -> set[str]:
    seen: set[str] = set()
    while condition():
        seen |= await versions_served(proxy, 2)
    return seen


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
        assert await versions_served(proxy, 1) == {"v2"}  # published: what nobody had was made up for


async def test_a_late_engine_gets_the_current_weights_before_its_first_request(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    port = free_port()
    settings = settings_for(broker, tmp_path, [engine.url, f"http://127.0.0.1:{port}"])
    late = ScriptedEngine(version="default")
    async with running_proxy(settings) as proxy:
        for version in ("v2", "v3"):
            assert (await update(proxy, version))[0] == 200
        await late.start(port)
        try:
            traffic = asyncio.ensure_future(served_while(proxy, lambda: not late.bodies))
            await both_up(proxy)
            await proxy.post(f"/v1/engines/{name(engine)}/drain", {})  # it is the late one's turn
            seen = await traffic
        finally:
            await late.stop()
    assert (seen, late.updates) == ({"v3"}, ["v3"])


@pytest.mark.parametrize("label", ["default", "v2", ""])
async def test_an_engine_started_anew_is_given_the_weights_whatever_label_it_has(
    broker: str, tmp_path: Path, engine: ScriptedEngine, second_engine: ScriptedEngine, label: str
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url, second_engine.url])
    async with running_proxy(settings) as proxy:
        await both_up(proxy)
        assert (await update(proxy, "v2"))[0] == 200
        given = len(second_engine.updates)
        await second_engine.restart(label)
        await until(lambda: len(second_engine.updates) > given, "its weights")
        await both_up(proxy)
        second_engine.bodies.clear()
        assert await versions_served(proxy) == {"v2"}
    assert second_engine.updates[given:] == ["v2"]
    assert second_engine.model_path == "/checkpoints/v2"


async def test_an_engine_that_starts_anew_during_an_update_is_left_out_and_catches_up(
    broker: str, tmp_path: Path, engine: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url, second_engine.url])
    async with running_proxy(settings) as proxy:
        await both_up(proxy)
        second_engine.hangs = {"/update_weights_from_disk"}
        updating = asyncio.ensure_future(update(proxy, "v2"))
        await until(lambda: engine.updates, "the other's update")
        await second_engine.restart()
        status, outcome = await updating
        assert (status, outcome["activated"]) == (200, [name(engine)])
        assert await versions_served(proxy) == {"v2"}
        second_engine.hangs = set()
        await both_up(proxy)
        assert await versions_served(proxy) == {"v2"}


async def test_an_engine_that_started_anew_between_two_looks_gives_itself_away_by_its_first_answer(
    broker: str, tmp_path: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        assert (await update(proxy, "v2"))[0] == 200
        catch_up = proxy.parts.updates.catch_up
        monkeypatch.setattr(catch_up, "look_after", nobody_looks)
        engine.version, engine.model_path = "default", "scripted"
        assert await versions_served(proxy, 1) == {"default"}  # the truth is recorded
        status, reply = await proxy.generate(await proxy.open("later"), [1], 2)
        assert (status, reply["error"]["engines"]) == (503, {name(engine): "behind"})
        monkeypatch.undo()
        for _ in range(2):  # a label that nobody has published is looked at twice
            await catch_up.look_after(proxy.parts.registry.engines[0])
        assert await versions_served(proxy, 1) == {"v2"}


async def test_a_restarted_proxy_does_not_load_again_what_an_engine_has(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        await update(proxy, "v2")
    async with running_proxy(settings) as proxy:
        assert await versions_served(proxy, 1) == {"v2"}
    assert engine.updates == ["v2"]


async def test_a_version_that_no_engine_can_load_is_given_up_for_the_one_before(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        assert (await update(proxy, "v2"))[0] == 200
        engine.unloadable = {"v3"}
        assert (await update(proxy, "v3"))[0] == 422
        assert await versions_served(proxy, 1) == {"v2"}
        await engine.restart()
        await until(lambda: engine.updates == ["v2", "v2"], "the weights of before")
        await until(lambda: proxy.parts.registry.usable, "its return")
    await engine.restart()
    async with running_proxy(settings) as proxy:
        assert await versions_served(proxy, 1) == {"v2"}


async def test_a_hanging_engine_does_not_hold_up_the_start(
    broker: str, tmp_path: Path, engine: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    settings: Settings = settings_for(broker, tmp_path, [engine.url, second_engine.url])
    second_engine.hangs = {"/model_info"}
    async with running_proxy(settings) as proxy:
        assert (await update(proxy, "v2"))[1]["activated"] == [name(engine)]
        assert await versions_served(proxy) == {"v2"}
        assert await states(proxy) == {name(engine): "up", name(second_engine): "down"}


async def test_another_proxy_of_the_same_engine_resumes_and_follows_instead_of_undoing_the_update(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as one, running_proxy(settings) as other:
        assert (await update(one, "v2"))[0] == 200
        looks = other.parts.updates.catch_up
        await until(lambda: "v2" in other.parts.control.published, "the news")
        await looks.look_after(other.parts.registry.engines[0])
        engine.held_at = 2
        call = asyncio.ensure_future(other.generate(await other.open(), [1], 5))
        await until(lambda: engine.holds, "the other's call")
        engine.held_at = None
        assert (await update(one, "v3"))[0] == 200
        _, reply = await call
        await until(lambda: "v3" in other.parts.control.published, "the news")
        await looks.look_after(other.parts.registry.engines[0])
        assert other.parts.registry.wanted == ("v3", "/checkpoints/v3")
        assert await versions_served(other, 1) == {"v3"}
        assert (await update(one, "v4"))[0] == 200
        await until(lambda: "v4" in other.parts.control.published, "the news")
        for sample in range(2):  # without a look: the first answer tells, and nobody is refused
            assert (await other.generate(await other.open("g1", sample), [1], 2))[0] == 200
        assert other.parts.registry.wanted == ("v4", "/checkpoints/v4")
    assert reply["output_ids"] == [token_at(1 + i) for i in range(5)]
    assert reply["meta_info"]["hoofprint"]["versions"] == ["v2", "v3"]
    assert engine.updates == ["v2", "v3", "v4"]


async def test_a_label_that_the_log_does_not_know_yet_is_not_undone_at_first_sight(
    broker: str, tmp_path: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        assert (await update(proxy, "v2"))[0] == 200
        look, seen = proxy.parts.updates.catch_up.look_after, proxy.parts.registry.engines[0]
        monkeypatch.setattr(proxy.parts.updates.catch_up, "look_after", nobody_looks)
        engine.version, engine.model_path = "v3", "/checkpoints/v3"  # another proxy's doing
        await look(seen)
        assert (engine.updates, proxy.parts.registry.usable) == (["v2"], [])
        proxy.parts.control.published["v3"] = "/checkpoints/v3"  # its word has come
        await look(seen)
        assert (proxy.parts.registry.wanted, proxy.parts.registry.usable) == (
            ("v3", "/checkpoints/v3"),
            [seen],
        )
    assert engine.updates == ["v2"]


async def test_a_watch_that_breaks_ends_the_process_instead_of_watching_no_more(
    broker: str, tmp_path: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[HoofprintError] = []

    async def broken(_engine: object) -> None:
        raise ZeroDivisionError("a mistake")

    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        proxy.parts.on_failure = failures.append
        monkeypatch.setattr(proxy.parts.updates.catch_up, "look_after", broken)
        await until(lambda: failures, "its end")
    assert "a mistake" in failures[0].message
