"""Two replicas on one log, without stickiness: every answered turn is a valid segment, token-exact, whoever claims when."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from chat_rig import TOKENIZER, api_settings, says, write_tokenizer
from proxy_process import ProxyProcess, free_port
from proxy_rig import Proxy, log_of, running_proxy, settings_for, until
from scripted_engine import ScriptedEngine

from journal.producer import Position
from journal.topic_admin import create_topics
from proxy.log_fold import SessionLog, read_log
from schemas.events import Event, SessionClaimed, TokenSegment, TrajectoryEnded
from schemas.settings import Settings
from schemas.tokens import ids_of
from schemas.topics import SEGMENTS
from stack.broker.embedded import EmbeddedKafka

pytestmark = pytest.mark.broker


async def session_log(settings: Settings, session_id: str) -> SessionLog:
    events = await asyncio.to_thread(log_of, settings, SEGMENTS)
    return read_log(e for e in events if getattr(e, "session_id", None) == session_id)


def tokens_of(log: SessionLog, index: int | None) -> list[int]:
    """The whole lineage up to a segment."""
    if index is None:
        return []
    segment = log.segments[index]
    before = tokens_of(log, segment.parent_segment_index)
    if segment.branch_point is not None:
        before = before[: segment.branch_point]
    return [*before, *ids_of(segment.context_ids).tolist(), *ids_of(segment.output_ids).tolist()]


def check_answers(log: SessionLog, answers: list[tuple[list[int], dict[str, Any]]]) -> None:
    """Each answer (prompt, reply) is a valid segment of exactly these tokens, and no two are the same one."""
    places = [reply["meta_info"]["hoofprint"]["segment_index"] for _, reply in answers]
    assert len(set(places)) == len(places)
    for (prompt, reply), index in zip(answers, places, strict=True):
        assert tokens_of(log, index) == [*prompt, *reply["output_ids"]]


@pytest_asyncio.fixture
async def replicas(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> AsyncIterator[tuple[Settings, Proxy, Proxy]]:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings) as one, running_proxy(settings) as two:
        yield settings, one, two


def path_of(opened: dict[str, Any], what: str = "/generate") -> str:
    return f"/s/{opened['token']}{what}"


async def turn(
    proxy: Proxy, opened: dict[str, Any], ids: list[int], tokens: int = 3
) -> tuple[int, dict[str, Any]]:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": tokens}}
    return await proxy.post(path_of(opened), body)


async def test_a_native_session_goes_to_and_fro(replicas: tuple[Settings, Proxy, Proxy]) -> None:
    settings, one, two = replicas
    opened = await one.open()
    context, answers = [1, 2], []
    for number in range(8):
        status, reply = await turn((one, two)[number % 2], opened, context)
        assert status == 200, reply
        answers.append((context, reply))
        context = [*context, *reply["output_ids"], 5]
    status, end = await one.post(path_of(opened, "/session/finalize"), {"reward": 1.0})
    assert (status, end["segment_count"]) == (200, 8)
    assert (await two.post(path_of(opened, "/session/finalize"), {"reward": 0.0}))[1] == end
    log = await session_log(settings, opened["session_id"])
    assert sorted(log.segments) == list(range(8))
    check_answers(log, answers)
    assert len({s.lineage_id for s in log.segments.values()}) == 1
    assert log.end is not None
    assert (log.end.segment_count, log.end.reward) == (8, 1.0)


async def test_a_conversation_goes_to_and_fro(broker: str, tmp_path: Path, engine: ScriptedEngine) -> None:
    engine.tokens = lambda prompt: says(f"answer {len(prompt)}")(prompt)
    settings = api_settings(broker, tmp_path, engine, write_tokenizer(tmp_path / "tokenizer"))
    async with running_proxy(settings) as one, running_proxy(settings) as two:
        opened = await one.open()
        messages: Any = []
        for number in range(6):
            base = (one, two)[number % 2].base + path_of(opened, "/v1")
            async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=2) as client:
                messages.append({"role": "user", "content": f"question {number}"})
                said = await client.chat.completions.create(model="p", messages=messages)
            messages.append({"role": "assistant", "content": said.choices[0].message.content})
    log = await session_log(settings, opened["session_id"])
    assert [log.segments[n].lineage_reason for n in range(6)] == ["first", None, None, None, None, None]
    assert sorted(log.segments) == list(range(6))
    rendered = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert TOKENIZER.decode(tokens_of(log, 5)) + "\n" == rendered


async def test_parallel_turns_at_both_replicas_are_all_valid(
    replicas: tuple[Settings, Proxy, Proxy], engine: ScriptedEngine
) -> None:
    settings, one, two = replicas
    engine.delay_s = 0.02
    opened = await one.open()
    prompts = [[n, n] for n in range(1, 9)]

    async def ask(proxy: Proxy, prompt: list[int]) -> tuple[list[int], dict[str, Any]]:
        for _ in range(20):
            status, reply = await turn(proxy, opened, prompt)
            if status == 200:
                return prompt, reply
            assert (status, reply["error"]["code"]) == (409, "session_conflict")
        raise AssertionError("never served")

    answers = await asyncio.gather(*(ask((one, two)[n % 2], p) for n, p in enumerate(prompts)))
    check_answers(await session_log(settings, opened["session_id"]), list(answers))


async def test_both_claim_at_once(
    broker: str, tmp_path: Path, engine: ScriptedEngine, replicas: tuple[Settings, Proxy, Proxy]
) -> None:
    settings, one, two = replicas
    async with running_proxy(settings) as first:
        opened = await first.open()
        _, reply = await turn(first, opened, [1])
    answers = [([1], reply)]
    context = [1, *reply["output_ids"], 9]
    results = await asyncio.gather(*(turn(proxy, opened, context) for proxy in (one, two)))
    for status, reply in results:
        assert status in (200, 409), reply
        if status == 200:
            answers.append((context, reply))
    assert len(answers) > 1
    check_answers(await session_log(settings, opened["session_id"]), answers)


async def test_calls_that_come_one_behind_the_other_share_one_claim(
    replicas: tuple[Settings, Proxy, Proxy],
) -> None:
    settings, one, two = replicas
    opened = await one.open()
    access = two.parts.access
    inside, largest = 0, 0

    async def enter() -> None:
        nonlocal inside, largest
        async with access._claiming("s"):
            inside += 1
            largest = max(largest, inside)
            await asyncio.sleep(0.003)
            inside -= 1

    async def drip() -> None:
        calls = []
        for _ in range(20):
            calls.append(asyncio.ensure_future(enter()))
            await asyncio.sleep(0.002)  # some arrive just when the lock is handed on
        await asyncio.gather(*calls)

    await drip()
    assert largest == 1
    assert not access._turnstiles
    answers = await asyncio.gather(*(turn(two, opened, [n]) for n in range(1, 7)))
    assert [status for status, _ in answers] == [200] * 6
    claims = await asyncio.to_thread(log_of, settings, SEGMENTS, SessionClaimed)
    assert [claim.restart for claim in claims] == [True, False]


async def test_both_open_anew_at_once(replicas: tuple[Settings, Proxy, Proxy]) -> None:
    settings, one, two = replicas
    opened = await asyncio.gather(*(proxy.open() for proxy in (one, two)))
    for proxy, mine in zip((one, two), opened, strict=True):
        status, reply = await turn(proxy, mine, [1])
        assert status in (200, 410), reply
        if status == 200:
            check_answers(await session_log(settings, mine["session_id"]), [([1], reply)])


async def test_a_held_record_of_a_zombie_is_no_answer_unless_it_counts(
    replicas: tuple[Settings, Proxy, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, one, two = replicas
    opened = await one.open()
    _, reply = await turn(one, opened, [1])
    answers, context = [([1], reply)], [1, *reply["output_ids"], 9]
    producer, held, release = one.parts.producer, asyncio.Event(), asyncio.Event()
    publish = producer.apublish

    async def late(event: Event) -> Position:
        if isinstance(event, TokenSegment) and not release.is_set():
            held.set()
            await release.wait()
        return await publish(event)

    monkeypatch.setattr(producer, "apublish", late)
    zombie = asyncio.ensure_future(turn(one, opened, context))
    await held.wait()
    status, reply = await turn(two, opened, [*context, 8])
    assert status == 200
    answers.append(([*context, 8], reply))
    release.set()
    status, reply = await zombie
    assert status == 200, reply  # claimed back: its tokens stand behind what the other wrote
    answers.append((context, reply))
    written = await asyncio.to_thread(log_of, settings, SEGMENTS, TokenSegment)
    log = await session_log(settings, opened["session_id"])
    check_answers(log, answers)
    assert (len(written), len(log.segments)) == (4, 3)  # the late record is there, and void


async def test_a_turn_that_goes_on_from_a_void_try_is_refused(
    replicas: tuple[Settings, Proxy, Proxy], engine: ScriptedEngine
) -> None:
    settings, one, two = replicas
    opened = await one.open()
    engine.held_at = 1
    zombie = asyncio.ensure_future(turn(one, opened, [1]))
    await until(lambda: engine.running, "the engine call")
    anew = await two.open()
    engine.go.set()
    status, reply = await zombie
    assert (status, reply["error"]["code"]) == (410, "trajectory_gone")
    assert (await turn(one, opened, [1]))[0] == 410  # the old token is of the old try
    assert (await turn(two, opened, [1]))[0] == 410
    status, reply = await turn(one, anew, [1])
    assert status == 200
    check_answers(await session_log(settings, opened["session_id"]), [([1], reply)])


async def test_a_session_that_moved_does_not_expire_where_it_was(
    replicas: tuple[Settings, Proxy, Proxy],
) -> None:
    settings, one, two = replicas
    opened = await one.open()
    _, reply = await turn(one, opened, [1])
    context = [1, *reply["output_ids"], 9]
    assert (await turn(two, opened, context))[0] == 200
    one.parts.table.open[opened["session_id"]].used_at = 0
    await until(lambda: not one.parts.table.open, "the expiry at the first")
    assert (await turn(two, opened, [*context, 7]))[0] == 200
    assert (await turn(one, opened, [*context, 6]))[0] == 200
    ends = await asyncio.to_thread(log_of, settings, SEGMENTS, TrajectoryEnded)
    log = await session_log(settings, opened["session_id"])
    assert len(ends) == 1
    assert log.end is None


async def test_header_and_named_sessions_are_found_at_the_other_replica(
    replicas: tuple[Settings, Proxy, Proxy],
) -> None:
    settings, one, two = replicas
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}
    assert (await one.post("/generate", body, **{"X-Session-Id": "h"}))[0] == 200
    _, opened = await two.post("/sessions", {"kind": "free", "session_id": "h"})
    status, reply = await turn(two, opened, [2])
    assert (status, reply["meta_info"]["hoofprint"]["segment_index"]) == (200, 1)
    status, end = await one.post("/session/finalize", {"session_id": "h", "reward": 1.0})
    assert (status, end["segment_count"]) == (200, 2)
    assert (await one.post("/session/finalize", {"session_id": "nobody"}))[0] == 404
    async with running_proxy(settings) as third:  # its token finds all of it in the log
        assert (await turn(third, opened, [3]))[0] == 409
    log = await session_log(settings, "h")
    assert sorted(log.segments) == [0, 1]


async def test_a_stopped_process_that_wakes_as_a_zombie(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url], proxy={"port": free_port()})
    zombie = ProxyProcess(settings, tmp_path)
    await asyncio.to_thread(zombie.start)
    try:
        async with running_proxy(settings) as other:
            opened = (await other.post(zombie.base + "/sessions", GROUP))[1]
            status, reply = await other.post(zombie.base + path_of(opened), native([1]))
            assert status == 200
            answers, context = [([1], reply)], [1, *reply["output_ids"], 9]
            engine.held_at = 1
            asked = asyncio.ensure_future(other.post(zombie.base + path_of(opened), native(context)))
            await until(lambda: engine.running, "the engine call")
            assert zombie._child is not None
            os.kill(zombie._child.pid, signal.SIGSTOP)
            engine.held_at = None
            status, reply = await turn(other, opened, [*context, 8])
            assert status == 200
            answers.append(([*context, 8], reply))
            engine.go.set()
            os.kill(zombie._child.pid, signal.SIGCONT)
            status, reply = await asked
            assert status == 200
            answers.append((context, reply))
            status, reply = await turn(other, opened, [*context, 8, 8])
            assert status == 200
            answers.append(([*context, 8, 8], reply))
    finally:
        zombie.kill()
    check_answers(await session_log(settings, opened["session_id"]), answers)


GROUP = {"kind": "train", "group_id": "g", "attempt": 0, "sample_index": 0, "restart": True}


def native(ids: list[int]) -> dict[str, Any]:
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": 3}}


async def test_a_broker_that_stands_still_longer_than_the_limit(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    kafka = EmbeddedKafka(tmp_path / "broker")
    await asyncio.to_thread(kafka.start)
    try:
        settings = settings_for(
            kafka.bootstrap_servers, tmp_path, [engine.url], kafka={"publish_timeout_s": 1.5}
        )
        await asyncio.to_thread(create_topics, settings.kafka)
        async with running_proxy(settings) as one, running_proxy(settings) as two:
            opened = await one.open()
            _, reply = await turn(one, opened, [1])
            answers, context = [([1], reply)], [1, *reply["output_ids"], 9]
            os.kill(kafka.pid, signal.SIGSTOP)
            status, reply = await turn(one, opened, context)
            assert (status, reply["error"]["code"]) == (503, "publish_timeout")
            os.kill(kafka.pid, signal.SIGCONT)
            for number in range(40):  # what the broker had taken meanwhile may be in the log, or not
                status, reply = await turn((one, two)[number % 2], opened, context)
                if status == 200:
                    answers.append((context, reply))
                    context = [*context, *reply["output_ids"], 9]
                if len(answers) == 4:
                    break
            assert len(answers) == 4
        log = await session_log(settings, opened["session_id"])
        assert sorted(log.segments) == list(range(len(log.segments)))
        check_answers(log, answers)
    finally:
        await asyncio.to_thread(kafka.stop)
