"""kill -9 of the proxy, a broker that is away, and the real CPU engine behind it all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from proxy_process import ProxyProcess, free_port
from proxy_rig import log_of, running_proxy, settings_for, until
from scripted_engine import ScriptedEngine
from tiny_chat import write_chat_checkpoint

from journal.topic_admin import create_topics
from proxy.log_fold import SessionLog, read_log
from schemas.events import SessionClaimed
from schemas.settings import Settings
from schemas.tokens import ids_of
from schemas.topics import SEGMENTS
from stack.broker.embedded import EmbeddedKafka
from stack.engine.launch import EngineProcess

pytestmark = [pytest.mark.broker, pytest.mark.engine]


@pytest.fixture(scope="module")
def chat_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_checkpoint(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def cpu_engine(chat_checkpoint: Path) -> Iterator[str]:
    with EngineProcess(chat_checkpoint, min_step_ms=5) as process:
        yield process.base_url


async def post(http: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, Any]:
    async with http.post(url, json=body) as reply:
        return reply.status, await reply.json()


async def session_log(settings: Settings, session_id: str) -> SessionLog:
    events = await asyncio.to_thread(log_of, settings, SEGMENTS)
    return read_log(e for e in events if getattr(e, "session_id", None) == session_id)


async def test_after_kill_9_native_and_chat_sessions_go_on_token_exactly(
    broker: str, tmp_path: Path, cpu_engine: str, chat_checkpoint: Path
) -> None:
    settings = settings_for(
        broker, tmp_path, [cpu_engine], proxy={"port": free_port()}, engine={"model": str(chat_checkpoint)}
    )
    proxy = ProxyProcess(settings, tmp_path)
    await asyncio.to_thread(proxy.start)
    sampling = {"max_new_tokens": 8, "sampling_seed": 5, "ignore_eos": True}
    user: Any = {"role": "user", "content": "hi"}
    async with aiohttp.ClientSession() as http:
        group = {"kind": "train", "group_id": "g", "attempt": 0, "restart": True}
        opened = [
            (await post(http, proxy.base + "/sessions", {**group, "sample_index": i}))[1] for i in range(3)
        ]
        native, chat, unfinished = opened
        _, one = await post(
            http, native["base_url"] + "/generate", {"input_ids": [1, 2, 3], "sampling_params": sampling}
        )
        client = openai.AsyncOpenAI(base_url=chat["base_url"] + "/v1", api_key="none", max_retries=0)
        said = await client.chat.completions.create(model="p", messages=[user], max_tokens=6, seed=1)
        history: Any = [user, {"role": "assistant", "content": said.choices[0].message.content}, user]
        long = {"input_ids": [9], "sampling_params": {**sampling, "max_new_tokens": 500}}
        cut = asyncio.ensure_future(post(http, unfinished["base_url"] + "/generate", long))
        await asyncio.sleep(0)
        await asyncio.to_thread(proxy.kill)
        with pytest.raises(aiohttp.ClientError):
            await cut
        await asyncio.to_thread(proxy.start)
        context = [1, 2, 3, *one["output_ids"], 7]
        status, two = await post(
            http, native["base_url"] + "/generate", {"input_ids": context, "sampling_params": sampling}
        )
        assert (status, two["meta_info"]["hoofprint"]["segment_index"]) == (200, 1)
        again = await client.chat.completions.create(model="p", messages=history, max_tokens=6)
        assert again.model_extra is not None
        assert again.model_extra["hoofprint"]["segment_index"] == 1
        status, _ = await post(
            http, unfinished["base_url"] + "/generate", {**long, "sampling_params": sampling}
        )
        assert status == 200
        status, end = await post(http, native["base_url"] + "/session/finalize", {"reward": 1.0})
        assert (status, end["segment_count"]) == (200, 2)
        assert await asyncio.to_thread(proxy.stop) == 0
    log = await session_log(settings, native["session_id"])
    assert sorted(log.segments) == [0, 1]
    assert log.segments[0].lineage_id == log.segments[1].lineage_id
    assert ids_of(log.segments[1].context_ids).tolist() == [7]
    assert ids_of(log.segments[0].output_ids).tolist() == one["output_ids"]
    assert ids_of(log.segments[1].output_ids).tolist() == two["output_ids"]
    talk = await session_log(settings, chat["session_id"])
    assert [s.lineage_reason for s in talk.segments.values()] == ["first", None]
    assert sorted((await session_log(settings, unfinished["session_id"])).segments) == [0]
    claims = await asyncio.to_thread(log_of, settings, SEGMENTS, SessionClaimed)
    claims = [claim for claim in claims if claim.session_id == native["session_id"]]
    assert [claim.restart for claim in claims] == [True, False]


async def test_weights_really_change_in_the_middle_of_a_generation(
    broker: str, tmp_path: Path, cpu_engine: str, chat_checkpoint: Path
) -> None:
    settings = settings_for(broker, tmp_path, [cpu_engine])
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        sampling = {"max_new_tokens": 200, "ignore_eos": True}
        body = {"input_ids": [1, 2], "sampling_params": sampling, "return_logprob": True}
        call = asyncio.ensure_future(proxy.post(opened["base_url"] + "/generate", body))
        await until(lambda: proxy.parts.policy._controller.running, "the engine call")
        generation = next(iter(proxy.parts.policy._controller.running.values()))
        status, outcome = await proxy.post(
            "/v1/policy/versions", {"version": "new", "checkpoint_uri": str(chat_checkpoint)}
        )
        assert (status, outcome["preempted"]) == (200, 1)
        status, reply = await call
        assert (status, generation.preemptions) == (200, 1)
    spans = reply["meta_info"]["weight_versions"]
    assert len(reply["output_ids"]) == 200
    assert len(reply["meta_info"]["output_token_logprobs"]) == 200
    assert spans[-1]["version"] == "new"
    assert spans[-1]["end"] == 200


async def test_without_a_broker_no_answer_and_afterwards_one_truth(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    kafka = EmbeddedKafka(tmp_path / "broker")
    await asyncio.to_thread(kafka.start)
    try:
        settings = settings_for(
            kafka.bootstrap_servers, tmp_path, [engine.url], kafka={"publish_timeout_s": 1.5}
        )
        await asyncio.to_thread(create_topics, settings.kafka)
        async with running_proxy(settings) as proxy:
            opened = await proxy.open()
            assert (await proxy.generate(opened, [1], 3))[0] == 200
            await asyncio.to_thread(kafka.kill)
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 3}}
            status, reply = await proxy.post(opened["base_url"] + "/generate", body)
            assert (status, reply["error"]["code"]) == (503, "publish_timeout")
            async with proxy.http.post(
                opened["base_url"] + "/generate", json={**body, "stream": True}
            ) as stream:
                assert b"[DONE]" not in await stream.read()
            await asyncio.to_thread(kafka.start)
            answers = []
            for _ in range(20):
                status, reply = await proxy.post(opened["base_url"] + "/generate", body)
                if status == 200:
                    answers.append(reply["meta_info"]["hoofprint"]["segment_index"])
                    break
            assert answers
        log = await session_log(settings, opened["session_id"])
        assert answers[0] in log.segments
        assert sorted(log.segments) == list(range(len(log.segments)))
    finally:
        await asyncio.to_thread(kafka.stop)
