"""Weights change under running generations: rules 4, 5 and 9, exact budgets, and engines that fail."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from proxy_rig import running_proxy, settings_for, until
from scripted_engine import ScriptedEngine, token_at
from update_calls import read, update

from journal.producer import AckProducer
from schemas.events import (
    PolicyActivated,
    PolicyPublished,
    TokenSegment,
    TrajectoryEnded,
    Verdict,
    identified,
)
from schemas.topics import CONTROL, SEGMENTS

pytestmark = pytest.mark.broker


async def test_a_preempted_generation_resumes_with_its_tokens_and_has_two_spans(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.held_at = 4
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        call = asyncio.ensure_future(proxy.generate(opened, [1, 2, 3], 10, return_logprob=True))
        await until(lambda: engine.running, "the engine call")
        engine.held_at = None  # the resumed call runs through; the first one waits for its abort
        status, outcome = await update(proxy, "v2", step=1)
        assert (status, outcome["preempted"], outcome["quiesced"]) == (200, 1, True)
        status, reply = await call
        assert status == 200
    meta = reply["meta_info"]
    assert reply["output_ids"] == [token_at(3 + i) for i in range(10)]
    assert meta["weight_versions"] == [
        {"version": "v1", "start": 0, "end": 4}, {"version": "v2", "start": 4, "end": 10},
    ]  # fmt: skip
    assert (meta["hoofprint"]["preemptions"], meta["finish_reason"]) == (1, {"type": "length", "length": 10})
    assert [b["sampling_params"]["max_new_tokens"] for b in engine.bodies] == [10, 6]
    assert engine.bodies[1]["input_ids"] == [1, 2, 3, *reply["output_ids"][:4]]
    (segment,) = await read(settings, SEGMENTS, TokenSegment)
    assert [(s.version, s.start, s.stop) for s in segment.spans] == [("v1", 0, 4), ("v2", 4, 10)]
    assert (segment.version_at_dispatch, segment.preemptions) == ("v1", 1)
    (published,) = await read(settings, CONTROL, PolicyPublished)
    (activated,) = await read(settings, CONTROL, PolicyActivated)
    assert (published.version, published.step, activated.version, activated.preempted) == ("v2", 1, "v2", 1)


async def test_a_version_that_is_active_is_answered_at_once_and_published_once(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        for _ in range(3):
            assert (await update(proxy, "v2"))[0] == 200
    assert engine.updates == ["v2"]
    assert len(await read(settings, CONTROL, PolicyPublished)) == 1


@pytest.mark.parametrize(("finish_in_abort", "tokens", "finish"), [(True, 4, "stop"), (False, 4, "length")])
async def test_rule_9_a_chunk_that_ended_or_used_up_its_budget_is_not_resumed(
    broker: str, tmp_path: Path, engine: ScriptedEngine, finish_in_abort: bool, tokens: int, finish: str
) -> None:
    engine.held_at = 4 if finish_in_abort else None
    engine.finish_in_abort, engine.late_finish = finish_in_abort, not finish_in_abort
    limit = 10 if finish_in_abort else 4
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        call = asyncio.ensure_future(proxy.generate(opened, [1], limit))
        await until(lambda: engine.running, "the engine call")
        _, outcome = await update(proxy, "v2")
        assert outcome["preempted"] == (0 if finish_in_abort else 1)
        _, reply = await call
    assert len(engine.bodies) == 1
    assert len(reply["output_ids"]) == tokens
    assert reply["meta_info"]["finish_reason"]["type"] == finish
    assert reply["meta_info"]["weight_versions"][-1]["version"] == "v1"


async def test_rule_4_refuses_before_the_resume_and_ends_the_trajectory_before_the_502(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url], staleness={"max_partial_rollout_preempts": 0})
    engine.held_at = 3
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        call = asyncio.ensure_future(proxy.generate(opened, [1], 10))
        await until(lambda: engine.running, "the engine call")
        await update(proxy, "v2")
        status, reply = await call
        (end,) = await read(settings, SEGMENTS, TrajectoryEnded)
        later = await proxy.generate(opened, [1], 10)
        finalized = await proxy.post(opened["base_url"] + "/session/finalize", {"status": "failed"})
    error = reply["error"]
    assert (status, error["code"]) == (502, "partial_rollout_staleness_exceeded")
    assert (error["versions"], error["version_span"], error["version_switches"]) == (["v1", "v2"], 2, 1)
    assert (error["max_preempts"], error["max_version_span"]) == (0, 1)
    assert (end.end.status, end.end.reason, end.end.segment_count) == ("failed", error["code"], 0)
    assert later[0] == 502
    assert {k: later[1]["error"][k] for k in ("code", "versions", "message")} == {
        k: error[k] for k in ("code", "versions", "message")
    }
    assert (finalized[0], finalized[1]["reason"]) == (200, error["code"])
    assert len(engine.bodies) == 1  # no engine time after the refusal
    assert await read(settings, SEGMENTS, TokenSegment) == []


@pytest.mark.parametrize(
    ("versions", "limit", "statuses"),
    [
        (["v1", "v2", "v1", "v2"], 1, [200, 200, 200, 200]),
        (["v1", "v2", "v3", "v2"], 1, [200, 200, 502, 502]),
        (["v1", "-1", "unknown", "v2"], 1, [200, 200, 200, 200]),
        (["v1", "v2"], 0, [200, 502]),
    ],
)
async def test_rule_4_over_turns(
    broker: str, tmp_path: Path, engine: ScriptedEngine, versions: list[str], limit: int, statuses: list[int]
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url], staleness={"max_partial_rollout_preempts": limit})
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        found = []
        for version in versions:
            engine.version = version  # an outer trainer's doing: the proxy learns it from the reply
            found.append((await proxy.generate(opened, [1], 2))[0])
    assert found == statuses


async def test_rule_5_non_partial_mode_refuses_another_version(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url], staleness={"partial_rollout": False})
    async with running_proxy(settings) as proxy:
        opened, fresh = await proxy.open(), await proxy.open(sample=1)
        assert (await proxy.generate(opened, [1], 2))[0] == 200
        await update(proxy, "v2")
        calls = len(engine.bodies)
        status, reply = await proxy.generate(opened, [1], 2)
        assert (status, reply["error"]["code"]) == (502, "trajectory_version_changed")
        assert len(engine.bodies) == calls  # before the engine is called
        assert (await proxy.generate(fresh, [1], 2))[0] == 200
    (end,) = await read(settings, SEGMENTS, TrajectoryEnded)
    assert end.end.reason == "trajectory_version_changed"


async def test_an_update_that_cannot_quiesce_is_refused_unless_forced(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.held_at, engine.obeys_aborts = 2, False
    settings = settings_for(broker, tmp_path, [engine.url], proxy={"quiesce_timeout_s": 0.2})
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        call = asyncio.ensure_future(proxy.generate(opened, [1], 5))
        await until(lambda: engine.running, "the engine call")
        status, reply = await update(proxy, "v2")
        error = reply["error"]
        assert (status, error["code"], error["quiesced"]) == (409, "not_quiesced", False)
        assert error["running"] == list(engine.running)
        assert engine.updates == []
        status, outcome = await update(proxy, "v2", force=True)
        assert (status, outcome["quiesced"], outcome["activated"] != []) == (200, False, True)
        engine.go.set()
        _, answer = await call
    assert [s["version"] for s in answer["meta_info"]["weight_versions"]] == [
        "v1",
        "v2",
    ]  # the engine's own spans


async def test_an_engine_that_fails_the_update_leaves_the_rotation(
    broker: str, tmp_path: Path, engine: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url, second_engine.url])
    second_engine.fails_updates = True
    async with running_proxy(settings) as proxy:
        status, outcome = await update(proxy, "v2")
        assert (status, len(outcome["activated"]), len(outcome["failed"])) == (200, 1, 1)
        for sample in range(4):
            await proxy.generate(await proxy.open(sample=sample), [1], 2)
        assert (len(engine.bodies), len(second_engine.bodies)) == (4, 0)
        second_engine.fails_updates = False
        await until(lambda: second_engine.version == "v2", "the late engine's weights")
        await until(lambda: len(proxy.parts.registry.usable) == 2, "its return")


async def test_if_no_engine_took_the_version_the_old_one_goes_on(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.held_at, engine.fails_updates = 2, True
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        call = asyncio.ensure_future(proxy.generate(opened, [1], 5))
        await until(lambda: engine.running, "the engine call")
        engine.held_at = None
        status, reply = await update(proxy, "v2")
        assert (status, reply["error"]["code"]) == (422, "version_refused")
        assert list(reply["error"]["failed"].values()) == ["no such checkpoint"]
        _, answer = await call
    assert answer["meta_info"]["weight_versions"] == [{"version": "v1", "start": 0, "end": 5}]


async def test_retract_lets_the_engine_hold_its_requests(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.held_at = 2
    settings = settings_for(broker, tmp_path, [engine.url], proxy={"update_strategy": "retract"})
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        call = asyncio.ensure_future(proxy.generate(opened, [1], 5))
        await until(lambda: engine.running, "the engine call")
        status, outcome = await update(proxy, "v2")
        assert (status, outcome["preempted"]) == (200, 0)  # what the engine holds was not cut
        assert (engine.paused, engine.aborted) == (False, [])
        engine.go.set()
        _, answer = await call
        async with proxy.http.get(proxy.base + "/v1/stats") as reply:
            assert (await reply.json())["preemptions"] == 1  # its spans tell, at the end
    assert len(engine.bodies) == 1
    assert answer["meta_info"]["hoofprint"]["preemptions"] == 1
    assert [a.preempted for a in await read(settings, CONTROL, PolicyActivated)] == [0]
    assert [s["version"] for s in answer["meta_info"]["weight_versions"]] == ["v1", "v2"]


async def test_a_dead_engine_s_tokens_are_kept_and_another_engine_goes_on(
    broker: str, tmp_path: Path, engine: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url, second_engine.url])
    engine.die_after = second_engine.die_after = 3
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        call = asyncio.ensure_future(proxy.generate(opened, [1], 8, return_logprob=True))
        await until(lambda: engine.bodies or second_engine.bodies, "the engine call")
        first, other = (engine, second_engine) if engine.bodies else (second_engine, engine)
        other.die_after = None
        await first.stop()
        status, reply = await call
    assert status == 200
    assert reply["output_ids"] == [token_at(1 + i) for i in range(8)]
    assert len(reply["meta_info"]["output_token_logprobs"]) == 8


async def test_without_any_engine_the_answer_is_503(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        await engine.stop()
        status, reply = await proxy.generate(opened, [1], 8)
        assert (status, reply["error"]["code"]) == (503, "engine_unavailable")
        assert (await proxy.post("/v1/policy/versions", {"version": "v2", "checkpoint_uri": "/x"}))[0] == 503
    assert await read(settings, SEGMENTS, TokenSegment) == []


async def test_a_restarted_proxy_brings_engines_to_the_newest_version_and_ends_a_pause(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        await update(proxy, "v2")
    engine.version, engine.paused = "default", True
    async with running_proxy(settings) as proxy:
        status, reply = await proxy.generate(await proxy.open(), [1], 2)
    assert (engine.version, engine.paused, status) == ("v2", False, 200)
    assert reply["meta_info"]["hoofprint"]["versions"] == ["v2"]


async def test_a_published_version_that_nobody_activated_is_activated_at_the_start(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    event = PolicyPublished(
        run_id=settings.run.run_id, occurred_at=1, version="v9", checkpoint_uri="/checkpoints/v9"
    )
    producer = AckProducer(settings.kafka, "test")
    await asyncio.to_thread(producer.publish, identified(event))
    await asyncio.to_thread(producer.close)
    async with running_proxy(settings) as proxy:
        assert (await update(proxy, "v9"))[1]["activated"] == [proxy.parts.registry.engines[0].engine_id]
    assert engine.updates == ["v9"]
    assert [e.version for e in await read(settings, CONTROL, PolicyActivated)] == ["v9"]


async def test_a_pause_holds_new_requests_and_preempts_running_ones(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.held_at = 2
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        call = asyncio.ensure_future(proxy.generate(opened, [1], 5))
        await until(lambda: engine.running, "the engine call")
        _, paused = await proxy.post("/v1/rollout/pause", {"reason": "outer trainer"})
        assert (paused["quiesced"], paused["running"]) == (True, [])
        held = asyncio.ensure_future(proxy.generate(await proxy.open(sample=1), [1], 5))
        await until(lambda: proxy.parts.gate.waiting == 2, "both at the gate")
        engine.held_at, engine.version = None, "outer-2"
        await proxy.post("/v1/rollout/resume", {"version": "outer-2"})
        versions = [(await c)[1]["meta_info"]["hoofprint"]["versions"] for c in (call, held)]
    assert versions == [["v1", "outer-2"], ["outer-2"]]


async def test_a_verdict_closes_the_attempt_s_sessions(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.held_at = 2
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open("g7")
        call = asyncio.ensure_future(proxy.generate(opened, [1], 5))
        await until(lambda: engine.running, "the engine call")
        verdict = Verdict(
            run_id=settings.run.run_id, occurred_at=1, cause_offset=0, index=0, group_id="g7", attempt=0,
            outcome="retry", reason="timeout", next_attempt=1,
        )  # fmt: skip
        await proxy.parts.producer.apublish(identified(verdict))
        assert (await call)[0] == 410
        await until(lambda: not engine.running, "the engine's abort")
        assert (await proxy.generate(opened, [1], 5))[0] == 410
        status, _ = await proxy.post(
            "/sessions", {"kind": "train", "group_id": "g7", "attempt": 0, "sample_index": 1}
        )
        assert status == 410
        assert (await proxy.open("g7", attempt=1))["session_id"] != opened["session_id"]
