"""The log is away: every API waits up to the limit, then says so in its own words, and never shows a finished answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from api_calls import APIS, Api
from chat_rig import always_says, api_settings, write_tokenizer
from proxy_rig import Proxy, log_of, running_proxy
from scripted_engine import ScriptedEngine

from journal.topic_admin import create_topics
from proxy.log_fold import read_log
from schemas.settings import Settings
from schemas.topics import SEGMENTS
from stack.broker.embedded import EmbeddedKafka

pytestmark = pytest.mark.broker


@dataclass
class Rig:
    kafka: EmbeddedKafka
    proxy: Proxy
    settings: Settings


@pytest_asyncio.fixture
async def rig(tmp_path: Path, engine: ScriptedEngine) -> AsyncIterator[Rig]:
    engine.tokens, engine.delay_s = always_says("well well well"), 0.01
    kafka = EmbeddedKafka(tmp_path / "broker")
    await asyncio.to_thread(kafka.start)
    try:
        checkpoint = write_tokenizer(tmp_path / "tokenizer")
        settings = api_settings(kafka.bootstrap_servers, tmp_path, engine, checkpoint)
        brief = settings.kafka.model_copy(update={"publish_timeout_s": 2.0})
        settings = settings.model_copy(update={"kafka": brief})
        await asyncio.to_thread(create_topics, settings.kafka)
        async with running_proxy(settings) as proxy:
            yield Rig(kafka, proxy, settings)
    finally:
        await asyncio.to_thread(kafka.stop)


@dataclass
class Answer:
    api: Api
    stream: bool
    session_id: str
    status: int
    headers: Any
    raw: bytes


async def ask(proxy: Proxy, api: Api, stream: bool, opened: dict[str, Any]) -> Answer:
    url = opened["base_url"] + api.path
    async with proxy.http.post(url, json=api.request(stream=stream)) as reply:
        return Answer(api, stream, opened["session_id"], reply.status, reply.headers, await reply.read())


async def ask_all(proxy: Proxy, opened: list[dict[str, Any]]) -> list[Answer]:
    cases = [(api, stream) for api in APIS for stream in (False, True)]
    return await asyncio.gather(
        *(ask(proxy, api, stream, session) for (api, stream), session in zip(cases, opened, strict=True))
    )


def check_refusal(answer: Answer) -> None:
    assert not any(mark in answer.raw for mark in answer.api.finished), answer
    assert b"publish_timeout" in answer.raw, answer
    if answer.stream:
        assert answer.status == 200, answer
        assert answer.api.broken in answer.raw.rstrip(b"\n").rpartition(b"\n\n")[2], answer
    else:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1"), answer
        assert (b'"type":"error"' in answer.raw) == (answer.api.name == "messages")


async def test_without_the_log_no_api_finishes_an_answer_and_with_it_all_go_on(rig: Rig) -> None:
    proxy = rig.proxy
    opened = [await proxy.open(sample=n) for n in range(2 * len(APIS))]
    for answer in await ask_all(proxy, opened):
        assert answer.status == 200
        assert not answer.stream or answer.api.finished[0] in answer.raw, answer
    await asyncio.to_thread(rig.kafka.kill)
    for answer in await ask_all(proxy, opened):
        check_refusal(answer)
    assert proxy.parts.limits.inflight == 0
    await asyncio.to_thread(rig.kafka.start)
    for session in opened:
        for _ in range(20):
            answer = await ask(proxy, APIS[0], False, session)
            if answer.status == 200:
                break
        assert answer.status == 200, answer
    events = await asyncio.to_thread(log_of, rig.settings, SEGMENTS)
    for session in opened:
        log = read_log(e for e in events if e.session_id == session["session_id"])
        assert sorted(log.segments) == list(range(len(log.segments)))
        assert len(log.segments) >= 2
