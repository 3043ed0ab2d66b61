"""`POST /v1/policy/versions` and an outer trainer's `/v1/rollout/resume`, with input that is wrong, late, or twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from proxy_rig import running_proxy, settings_for, until
from scripted_engine import ScriptedEngine
from update_calls import read, update

from schemas.events import PolicyActivated, PolicyPublished
from schemas.topics import CONTROL

pytestmark = pytest.mark.broker

BAD_BODIES: list[tuple[dict[str, Any], str]] = [
    ({"version": ""}, "version"),
    ({"version": "  "}, "version"),
    ({"version": None}, "version"),
    ({"version": "-1"}, "version"),
    ({"version": "Unknown"}, "version"),
    ({"version": "v" * 201}, "version"),
    ({"version": "v\n2"}, "version"),
    ({"version": "v\x002"}, "version"),
    ({"version": "v\u202e2"}, "version"),
    ({"version": ["v2"]}, "version"),
    ({"version": {"v": 2}}, "version"),
    ({"version": True}, "version"),
    ({"version": 1.5}, "version"),
    ({"checkpoint_uri": ""}, "checkpoint_uri"),
    ({"checkpoint_uri": None}, "checkpoint_uri"),
    ({"checkpoint_uri": 7}, "checkpoint_uri"),
    ({"checkpoint_uri": "/a\x00b"}, "checkpoint_uri"),
    ({"checkpoint_uri": "/" + "a" * 4096}, "checkpoint_uri"),
    ({"step": -1}, "step"),
    ({"step": 2**63}, "step"),
    ({"step": "1"}, "step"),
    ({"step": True}, "step"),
    ({"force": "false"}, "force"),
]


async def test_a_body_that_is_wrong_is_refused_by_its_field_and_changes_nothing(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        for more, field in BAD_BODIES:
            body = {"version": "v2", "checkpoint_uri": "/checkpoints/v2", **more}
            status, reply = await proxy.post("/v1/policy/versions", body)
            assert (status, reply["error"]["code"], reply["error"]["field"]) == (
                400,
                "invalid_request",
                field,
            )
        assert (await proxy.post("/v1/policy/versions", []))[0] == 400
        assert (await proxy.generate(await proxy.open(), [1], 2))[0] == 200
    assert (engine.updates, engine.version) == ([], "v1")
    assert await read(settings, CONTROL, PolicyPublished) == []


async def test_a_label_has_one_checkpoint(broker: str, tmp_path: Path, engine: ScriptedEngine) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        assert (await update(proxy, "v2"))[0] == 200
        for force in (False, True):
            status, reply = await update(proxy, "v2", checkpoint_uri="/checkpoints/other", force=force)
            assert (status, reply["error"]["code"]) == (409, "version_conflict")
            assert reply["error"]["published"] == "/checkpoints/v2"
        assert (await update(proxy, "v2", checkpoint_uri="file:///checkpoints/v2"))[0] == 200
    assert engine.updates == ["v2"]


async def test_an_older_version_comes_back_only_by_force(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        for version in ("v2", "v3"):
            await update(proxy, version)
        status, reply = await update(proxy, "v2")
        assert (status, reply["error"]["code"], reply["error"]["active"]) == (409, "version_conflict", "v3")
        assert engine.version == "v3"
        assert (await update(proxy, "v2", force=True))[0] == 200
        assert engine.updates == ["v2", "v3", "v2"]
        await engine.restart("v3")  # it is not taken for news
        await until(lambda: engine.updates[3:] == ["v2"], "the weights that an operator went back to")


async def test_two_at_once_are_done_one_after_the_other(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        answers = await asyncio.gather(*(update(proxy, version) for version in ("v2", "v2", "v3", "v2")))
        assert sorted(status for status, _ in answers) in ([200, 200, 200, 200], [200, 200, 200, 409])
        newest = [e.version for e in await read(settings, CONTROL, PolicyPublished)]
        assert sorted(newest) == ["v2", "v3"]
        _, reply = await proxy.generate(await proxy.open(), [1], 2)
        assert reply["meta_info"]["hoofprint"]["versions"] == [newest[-1]]
    activated = [(e.version, e.engine_id) for e in await read(settings, CONTROL, PolicyActivated)]
    assert len(activated) == len(set(activated)) == 2


async def test_a_checkpoint_that_is_not_there_is_refused_once_and_not_tried_again(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.unloadable = {"v2"}
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        status, reply = await update(proxy, "v2")
        assert (status, reply["error"]["code"], reply["error"]["activated"]) == (422, "version_refused", [])
        assert (await proxy.generate(await proxy.open(), [1], 2))[0] == 200
        assert (await update(proxy, "v3"))[0] == 200
    assert engine.updates == ["v3"]
    assert [e.version for e in await read(settings, CONTROL, PolicyActivated)] == ["v3"]
    # a version that nobody took has no place in the window: it would make the others older
    assert [e.version for e in await read(settings, CONTROL, PolicyPublished)] == ["v3"]


async def test_an_outer_trainer_s_label_is_published_once_and_survives_the_proxy(
    broker: str, tmp_path: Path, engine: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url, second_engine.url])
    async with running_proxy(settings) as proxy:
        await until(lambda: len(proxy.parts.registry.usable) == 2, "both engines")
        assert (await update(proxy, "v2"))[0] == 200
        for _ in range(2):
            await proxy.post("/v1/rollout/pause", {})
            engine.version = "outer-3"  # the second engine did not get it
            assert (await proxy.post("/v1/rollout/resume", {"version": "outer-3"}))[0] == 200
        served = [await proxy.generate(await proxy.open(sample=i), [1], 2) for i in range(3)]
        assert [r["meta_info"]["hoofprint"]["versions"] for _, r in served] == [["outer-3"]] * 3
    async with running_proxy(settings) as proxy:
        _, reply = await proxy.generate(await proxy.open("again"), [1], 2)
        assert reply["meta_info"]["hoofprint"]["versions"] == ["outer-3"]
    published = [(e.version, e.checkpoint_uri) for e in await read(settings, CONTROL, PolicyPublished)]
    assert published == [("v2", "/checkpoints/v2"), ("outer-3", None)]
    assert [e.version for e in await read(settings, CONTROL, PolicyActivated)] == ["v2", "v2", "outer-3"]
    assert engine.updates == ["v2"]


async def test_a_label_that_no_engine_has_does_not_end_the_pause(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        await proxy.post("/v1/rollout/pause", {})
        status, reply = await proxy.post("/v1/rollout/resume", {"version": "v9"})
        assert (status, reply["error"]["code"]) == (409, "version_conflict")
        assert list(proxy.parts.gate.reasons) == ["rollout_pause"]
        assert (await proxy.post("/v1/rollout/resume", {"version": "v\n"}))[0] in (400, 409)
        assert (await proxy.post("/v1/rollout/resume", {}))[0] == 200
    assert await read(settings, CONTROL, PolicyPublished) == []
