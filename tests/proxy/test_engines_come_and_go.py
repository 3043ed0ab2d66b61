"""Engines that come late, start anew, or are given weights by somebody else: none serves what it should not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from proxy_process import free_port
from proxy_rig import Proxy, running_proxy, settings_for, until
from scripted_engine import ScriptedEngine, token_at
from update_calls import both_up, name, nobody_looks, read, states, update, versions_served

from schemas.errors import HoofprintError
from schemas.events import TokenSegment
from schemas.settings import Settings
from schemas.topics import SEGMENTS

pytestmark = pytest.mark.broker


async def served_while(proxy: Proxy, condition: Callable[[], bool]) -> set[str]:
    seen: set[str] = set()
    while condition():
        seen |= await versions_served(proxy, 2)
    return seen


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
    recorded = sorted(await read(settings, SEGMENTS, TokenSegment), key=lambda segment: segment.done_at)
    assert [[span.version for span in segment.spans] for segment in recorded] == [["default"], ["v2"]]
    assert [segment.version_at_dispatch for segment in recorded] == ["v2", "v2"]


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
