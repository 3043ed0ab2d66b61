"""One engine is taken out of the rotation without losing what it runs, and comes back when it is told to."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from proxy_rig import Proxy, running_proxy, settings_for, until
from scripted_engine import ScriptedEngine, token_at
from update_calls import both_up, get, name, states, update

from proxy.drains import Drains
from schemas.errors import ConfigError

pytestmark = pytest.mark.broker


async def drain(proxy: Proxy, engine: ScriptedEngine, **body: object) -> tuple[int, dict[str, Any]]:
    return await proxy.post(f"/v1/engines/{name(engine)}/drain", body)


async def test_a_running_generation_may_end_and_its_session_goes_on_elsewhere(
    broker: str, tmp_path: Path, engine: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url, second_engine.url])
    engine.held_at = second_engine.held_at = 2
    async with running_proxy(settings) as proxy:
        await both_up(proxy)
        opened = await proxy.open()
        call = asyncio.ensure_future(proxy.generate(opened, [1], 5))
        await until(lambda: engine.holds + second_engine.holds, "the engine call")
        here, there = (engine, second_engine) if engine.holds else (second_engine, engine)
        draining = asyncio.ensure_future(drain(proxy, here))
        await until(lambda: proxy.parts.registry.usable[0].engine_id == name(there), "the drain")
        facts = {e["engine_id"]: e for e in (await get(proxy, "/v1/engines"))["engines"]}
        assert facts[name(here)]["state"] == "draining"
        assert [r["session_id"] for r in facts[name(here)]["running"]] == [opened["session_id"]]
        here.go.set()
        there.go.set()
        status, reply = await call
        assert (status, reply["meta_info"]["hoofprint"]["preemptions"], here.aborted) == (200, 0, [])
        status, drained = await draining
        assert (status, drained["aborted"], drained["running"]) == (200, [], [])
        assert (await proxy.generate(opened, [1, *reply["output_ids"], 9], 2))[0] == 200
        assert (len(here.bodies), len(there.bodies)) == (1, 1)


@pytest.mark.parametrize("obeys", [True, False])
async def test_what_still_runs_after_the_time_is_ended_and_resumes_elsewhere(
    broker: str, tmp_path: Path, engine: ScriptedEngine, second_engine: ScriptedEngine, obeys: bool
) -> None:
    settings = settings_for(
        broker, tmp_path, [engine.url, second_engine.url], proxy={"quiesce_timeout_s": 0.3}
    )
    engine.held_at = second_engine.held_at = 2
    async with running_proxy(settings) as proxy:
        await both_up(proxy)
        call = asyncio.ensure_future(proxy.generate(await proxy.open(), [1], 5))
        await until(lambda: engine.holds + second_engine.holds, "the engine call")
        here, there = (engine, second_engine) if engine.holds else (second_engine, engine)
        there.held_at, here.obeys_aborts = None, obeys
        rids = list(here.running)
        status, drained = await drain(proxy, here, timeout_seconds=0.1)
        assert (status, drained["aborted"], drained["running"]) == (200, rids, [])
        status, reply = await call
    assert (status, reply["output_ids"]) == (200, [token_at(1 + i) for i in range(5)])
    assert there.bodies[0]["input_ids"] == [1, token_at(1), token_at(2)]


async def test_it_stays_out_through_updates_until_it_is_undrained_and_gets_the_weights_first(
    broker: str, tmp_path: Path, engine: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url, second_engine.url])
    async with running_proxy(settings) as proxy:
        await both_up(proxy)
        assert (await drain(proxy, second_engine))[0] == 200
        for version in ("v2", "v3"):
            status, outcome = await update(proxy, version)
            assert (status, outcome["activated"], outcome["failed"]) == (200, [name(engine)], {})
        for sample in range(3):
            assert (await proxy.generate(await proxy.open(sample=sample), [1], 2))[0] == 200
        assert (second_engine.bodies, second_engine.updates) == ([], [])
        assert await states(proxy) == {name(engine): "up", name(second_engine): "draining"}
        async with proxy.http.get(proxy.base + "/metrics") as reply:
            text = await reply.text()
        assert f'hoofprint_engine_state{{engine="{name(second_engine)}",state="draining"}} 1.0' in text
        assert f'hoofprint_engine_state{{engine="{name(second_engine)}",state="up"}} 0.0' in text
        status, facts = await proxy.post(f"/v1/engines/{name(second_engine)}/undrain", {})
        assert (status, facts["state"]) == (200, "behind")
        await both_up(proxy)
        assert second_engine.updates == ["v3"]


async def test_the_last_engine_is_drained_only_by_force_and_an_unknown_one_is_404(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        status, reply = await drain(proxy, engine)
        assert (status, reply["error"]["code"]) == (409, "last_engine")  # type: ignore[index]
        assert (await proxy.generate(await proxy.open(), [1], 2))[0] == 200
        for path in ("/v1/engines/nobody:1/drain", "/v1/engines/nobody:1/undrain", "/v1/engines//drain"):
            assert (await proxy.post(path, {}))[0] == 404
        for bad in (
            {"force": 1},
            {"timeout_seconds": -1},
            {"timeout_seconds": "x"},
            {"timeout_seconds": 1e9},
        ):
            assert (await drain(proxy, engine, **bad))[0] == 400
        assert (await drain(proxy, engine, force=True))[0] == 200
        status, reply = await proxy.generate(await proxy.open(sample=1), [1], 2)
        assert (status, reply["error"]["engines"]) == (503, {name(engine): "draining"})
        assert (await update(proxy, "v2"))[0] == 503
        await proxy.post(f"/v1/engines/{name(engine)}/undrain", {})
        await until(lambda: proxy.parts.registry.usable, "its return")


async def test_engines_are_the_admin_s(broker: str, tmp_path: Path, engine: ScriptedEngine) -> None:
    settings = settings_for(broker, tmp_path, [engine.url], proxy={"admin_key": "secret-key"})
    async with running_proxy(settings) as proxy:
        async with proxy.http.get(proxy.base + "/v1/engines") as reply:
            assert reply.status == 401
        for verb in ("drain", "undrain"):
            assert (await proxy.post(f"/v1/engines/{name(engine)}/{verb}", {}))[0] == 401
        assert [e.draining for e in proxy.parts.registry.engines] == [False]


async def test_a_restarted_proxy_knows_what_was_drained(
    broker: str, tmp_path: Path, engine: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url, second_engine.url])
    async with running_proxy(settings) as proxy:
        await both_up(proxy)
        assert (await drain(proxy, engine))[0] == 200
    async with running_proxy(settings) as proxy:
        await until(lambda: proxy.parts.registry.usable, "an engine")
        assert (await states(proxy))[name(engine)] == "draining"
        for sample in range(4):
            assert (await proxy.generate(await proxy.open(sample=sample), [1], 2))[0] == 200
        assert (len(engine.bodies), len(second_engine.bodies)) == (0, 4)
        assert (await proxy.post(f"/v1/engines/{name(engine)}/undrain", {}))[0] == 200
    async with running_proxy(settings) as proxy:
        await both_up(proxy)


async def test_a_drain_that_cannot_be_kept_is_none(
    broker: str, tmp_path: Path, engine: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url, second_engine.url])
    async with running_proxy(settings) as proxy:
        await both_up(proxy)
        (settings.run_directory / f".drained_engines.json.{os.getpid()}").mkdir()  # in the way
        status, reply = await drain(proxy, engine)
        assert (status, reply["error"]["code"]) == (503, "store_error")
        await both_up(proxy)


def test_a_file_of_drains_that_holds_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "drained_engines.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="is not a list of engine ids"):
        Drains(tmp_path).read()
