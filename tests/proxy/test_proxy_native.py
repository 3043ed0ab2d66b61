"""Native turns through a real broker: what is answered is in the log, token by token, and nothing else is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from proxy_rig import log_of, running_proxy, settings_for, until
from scripted_engine import ScriptedEngine, token_at

from proxy.log_fold import read_log
from schemas.events import SessionClaimed, TokenSegment
from schemas.settings import Settings
from schemas.tokens import ids_of, logprobs_of
from schemas.topics import SEGMENTS

pytestmark = pytest.mark.broker


def outputs(first: int, count: int) -> list[int]:
    return [token_at(first + i) for i in range(count)]


async def segments(settings: Settings) -> list[TokenSegment]:
    return await asyncio.to_thread(log_of, settings, SEGMENTS, TokenSegment)


async def test_turns_append_to_one_lineage_and_the_log_has_their_tokens(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        _, first = await proxy.generate(opened, [1, 2, 3], 4, return_logprob=True)
        context = [1, 2, 3, *first["output_ids"], 9, 9]
        status, second = await proxy.generate(opened, context, 3)
        assert status == 200
        await proxy.post(opened["base_url"] + "/session/finalize", {"reward": 1.0})
        assert not proxy.parts.ownership.follows  # alone, it never reads the log for its answers
    one, two = await segments(settings)
    assert first["output_ids"] == outputs(3, 4)
    assert second["output_ids"] == outputs(9, 3)
    assert (one.segment_index, two.segment_index) == (0, 1)
    assert one.lineage_id == two.lineage_id
    assert (one.parent_segment_index, two.parent_segment_index, two.branch_point) == (None, 0, None)
    assert ids_of(one.context_ids).tolist() == [1, 2, 3]
    assert ids_of(two.context_ids).tolist() == [9, 9]
    assert ids_of(one.output_ids).tolist() == first["output_ids"]
    given = [triple[0] for triple in first["meta_info"]["output_token_logprobs"]]
    assert logprobs_of(one.output_logprobs).tolist() == pytest.approx(given)
    assert [(s.version, s.start, s.stop) for s in one.spans] == [("v1", 0, 4)]
    assert first["meta_info"]["hoofprint"]["segment_index"] == 0


async def test_the_same_request_again_is_a_branch_at_the_same_prefix(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        _, first = await proxy.generate(opened, [1], 2)
        again = [1, *first["output_ids"], 5]
        for _ in range(2):
            status, _ = await proxy.generate(opened, again, 2)
            assert status == 200
    _, unseen, retry = await segments(settings)
    assert (unseen.parent_segment_index, retry.parent_segment_index) == (0, 0)
    assert unseen.request_digest == retry.request_digest
    assert retry.lineage_id != unseen.lineage_id
    assert (retry.branch_point, retry.lineage_reason) == (3, "branch")


MALFORMED: list[tuple[dict[str, Any], int, str]] = [
    ({}, 400, "input_ids"),
    ({"input_ids": []}, 400, "input_ids"),
    ({"input_ids": "abc"}, 400, "input_ids"),
    ({"input_ids": [1, "x"]}, 400, "input_ids"),
    ({"input_ids": [1, 2**40]}, 400, "input_ids"),
    ({"input_ids": [1, -1]}, 400, "input_ids"),
    ({"input_ids": [1, 1000]}, 400, "input_ids"),
    ({"input_ids": [[1], [2]]}, 400, "input_ids"),
    ({"input_ids": [1], "sampling_params": []}, 400, "sampling_params"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, 400, "sampling_params.max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": "5"}}, 400, "sampling_params.max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"n": 2}}, 400, "sampling_params.n"),
    ({"input_ids": [1], "sampling_params": {"temperature": -1}}, 400, "sampling_params.temperature"),
    ({"input_ids": [1], "return_hidden_states": True}, 400, "return_hidden_states"),
    ({"input_ids": [1], "top_logprobs_num": -1}, 400, "top_logprobs_num"),
    ({"input_ids": [1], "final": True, "end": {"status": "odd"}}, 400, "end.status"),
    ({"input_ids": [1] * 4096}, 413, ""),
]


async def test_malformed_requests_are_refused_by_name_and_never_reach_the_engine(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        for body, status, field in MALFORMED:
            found, reply = await proxy.post(opened["base_url"] + "/generate", body)
            assert (found, reply["error"].get("field", "")) == (status, field), body
        for raw in (b"{", b"[]", b'"x"'):
            async with proxy.http.post(opened["base_url"] + "/generate", data=raw) as reply:
                assert reply.status == 400
        status, reply = await proxy.generate(opened, [1], 1, sampling_params={"foo": 1})
        assert (status, reply["error"]["code"]) == (400, "engine_rejected")
        assert "foo" in reply["error"]["message"]
    assert [body["sampling_params"] for body in engine.bodies] == [
        {"foo": 1, "temperature": 1.0, "max_new_tokens": 128, "stream_interval": 64}
    ]
    assert await segments(settings) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_leaves_nothing_behind(
    broker: str, tmp_path: Path, engine: ScriptedEngine, stream: bool
) -> None:
    """F20: the engine's request is aborted, the active entry goes, and a pause finds nothing that still generates."""
    engine.held_at = 3
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        call = asyncio.ensure_future(proxy.generate(opened, [1], 50, stream=stream))
        await until(lambda: engine.running, "the engine call")
        call.cancel()
        await until(lambda: not engine.running, "the engine's abort")
        await until(lambda: proxy.parts.limits.inflight == 0, "the end of the request")
        session = proxy.parts.table.open[opened["session_id"]]
        assert not session.inflight
        assert session.next_index == 0
        assert engine.aborted
        status, paused = await proxy.post("/v1/rollout/pause", {})
        assert (status, paused["quiesced"]) == (200, True)
    assert await segments(settings) == []


async def test_a_stream_is_cumulative_and_ends_with_spans_after_the_acknowledgement(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.delay_s = 0.01
    settings = settings_for(broker, tmp_path, [engine.url], proxy={"stream_frame_s": 0.0})
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        body = {
            "input_ids": [1],
            "sampling_params": {"max_new_tokens": 6},
            "stream": True,
            "return_logprob": True,
        }
        async with proxy.http.post(opened["base_url"] + "/generate", json=body) as reply:
            raw = await reply.read()
    frames = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line.startswith(b"data: ")]
    assert frames[-1] == b"[DONE]"
    events = [orjson.loads(frame) for frame in frames[:-1]]
    assert len(events) > 2
    assert all(outputs(1, 6)[: len(e["output_ids"])] == e["output_ids"] for e in events)
    assert events[-1]["output_ids"] == outputs(1, 6)
    assert events[-1]["meta_info"]["weight_versions"] == [{"version": "v1", "start": 0, "end": 6}]
    assert events[-1]["meta_info"]["hoofprint"]["segment_index"] == 0
    assert len(await segments(settings)) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_comes_back_in_the_other_mode_is_understood(
    broker: str, tmp_path: Path, engine: ScriptedEngine, stream: bool
) -> None:
    async with running_proxy(settings_for(broker, tmp_path, [engine.url])) as proxy:
        opened, ids = await proxy.open(), [1, 2]
        for incremental in (False, True, False, True, True, False):
            engine.incremental = incremental
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 6}, "stream": stream}
            async with proxy.http.post(opened["base_url"] + "/generate", json=body) as reply:
                raw = await reply.read()
            last = raw.removesuffix(b"data: [DONE]\n\n").rpartition(b"data: ")[2] if stream else raw
            output = orjson.loads(last)["output_ids"]
            assert output == [token_at(p) for p in range(len(ids), len(ids) + 6)]
            ids += [*output, 5]


async def test_an_incremental_engine_gives_the_same_tokens(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.incremental = True
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        for _ in range(2):
            _, reply = await proxy.generate(opened, [1, 2], 7, return_logprob=True)
            assert reply["output_ids"] == outputs(2, 7)
            assert len(reply["meta_info"]["output_token_logprobs"]) == 7


async def test_a_call_without_a_session_is_one_trajectory_of_its_own(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        status, _ = await proxy.post(
            "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}
        )
        assert status == 200
        assert not proxy.parts.table.open
    (segment,) = await segments(settings)
    assert (segment.kind, segment.group_id) == ("free", None)
    assert segment.end is not None


async def test_header_sessions_belong_to_a_group_only_if_they_say_so(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}
        await proxy.post("/generate", body, **{"X-Session-Id": "s-free", "X-Instance-Id": "i"})
        group = {
            "X-Session-Id": "s-group",
            "X-Instance-Id": "g9",
            "X-Hoofprint-Attempt": "0",
            "X-Hoofprint-Sample-Index": "3",
        }
        for _ in range(2):
            status, _ = await proxy.post("/generate", body, **group)
            assert status == 200
    free, *grouped = sorted(await segments(settings), key=lambda s: (s.session_id, s.segment_index))
    assert (free.kind, free.group_id) == ("free", None)
    assert [(s.kind, s.group_id, s.sample_index, s.segment_index) for s in grouped] == [
        ("train", "g9", 3, 0),
        ("train", "g9", 3, 1),
    ]


async def test_limits_answer_429_with_retry_after(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    """F16: whoever produces faster than the run takes is told to wait, and nothing is queued for it."""
    engine.held_at = 1
    limits = {"max_inflight": 1, "max_sessions": 1, "max_body_bytes": 2000}
    settings = settings_for(broker, tmp_path, [engine.url], proxy=limits)
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        call = asyncio.ensure_future(proxy.generate(opened, [1]))
        await until(lambda: engine.running, "the engine call")
        async with proxy.http.post(opened["base_url"] + "/generate", json={"input_ids": [1]}) as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (429, "1")
        status, _ = await proxy.post(
            "/sessions", {"kind": "train", "group_id": "g", "attempt": 0, "sample_index": 5}
        )
        assert status == 429
        status, reply_body = await proxy.post("/generate", {"input_ids": [1] * 2000})
        assert (status, reply_body["error"]["code"]) == (413, "body_too_large")
        engine.go.set()
        assert (await call)[0] == 200


async def test_opening_again_gives_the_same_session_and_restart_a_new_one(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        await proxy.generate(opened, [1])
        assert (await proxy.open(restart=False))["token"] == opened["token"]
        anew = await proxy.open()
        _, reply = await proxy.generate(anew, [1])
        assert reply["meta_info"]["hoofprint"]["segment_index"] == 0
    claims = await asyncio.to_thread(log_of, settings, SEGMENTS, SessionClaimed)
    assert [claim.restart for claim in claims] == [True, True]
    assert claims[0].epoch < claims[1].epoch


async def test_openings_at_the_same_time_leave_a_session_whose_events_are_valid(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as proxy:
        opened = await asyncio.gather(*(proxy.open() for _ in range(5)))
        newest = proxy.parts.table.open[opened[0]["session_id"]].token
        for each in opened:  # all but the last one were opened anew meanwhile
            status = 200 if each["token"] == newest else 410
            assert (await proxy.generate(each, [1]))[0] == status
    log = read_log(await asyncio.to_thread(log_of, settings, SEGMENTS))
    assert sorted(log.segments) == [0]


async def test_keys(broker: str, tmp_path: Path, engine: ScriptedEngine) -> None:
    settings = settings_for(broker, tmp_path, [engine.url], proxy={"admin_key": "sesame"})
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}
    async with running_proxy(settings) as proxy:
        assert (await proxy.post("/sessions", {"kind": "free"}))[0] == 401
        assert (await proxy.post("/v1/rollout/pause", {}))[0] == 401
        assert (await proxy.post("/generate", body, **{"X-Session-Id": "x"}))[0] == 401
        _, opened = await proxy.post("/sessions", {"kind": "free"}, Authorization="Bearer sesame")
        assert (await proxy.post(opened["base_url"] + "/generate", body))[0] == 200
        bearer = {"Authorization": f"Bearer {opened['token']}"}
        assert (await proxy.post("/generate", body, **bearer))[0] == 200
        forged = {"Authorization": f"Bearer {opened['token'][:-2]}xx"}
        assert (await proxy.post("/generate", body, **forged))[0] == 401
        assert (await proxy.post("/v1/rollout/pause", {}, **bearer))[0] == 401
