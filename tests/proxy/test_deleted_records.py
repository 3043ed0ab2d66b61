"""A session whose beginning was deleted from the log is refused; one that is open across a deletion goes on token-exactly."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest
from proxy_rig import log_of, running_proxy, settings_for
from scripted_engine import ScriptedEngine

from journal.clock import system_clock
from journal.producer import AckProducer
from journal.reader import TopicReader
from journal.record_deletion import delete_before
from journal.topic_admin import create_topics
from proxy.log_fold import read_log
from schemas import events as ev
from schemas.settings import Settings
from schemas.tokens import ids_of
from schemas.topics import SEGMENTS

pytestmark = pytest.mark.broker


def settings_of(kafka: str, directory: Path, engine: ScriptedEngine) -> Settings:
    """Topics that no other test writes to."""
    made = settings_for(
        kafka, directory, [engine.url], kafka={"topic_prefix": uuid.uuid4().hex[:8], "partitions": 1}
    )
    create_topics(made.kafka)
    return made


def first_of(settings: Settings, session_id: str) -> int:
    """Offset of a session's first record."""
    reader = TopicReader(settings.kafka, [SEGMENTS])
    try:
        return next(r.offset for r in reader.read_to_end() if session_id.encode() in r.value)
    finally:
        reader.close()


async def delete(settings: Settings, before: int) -> None:
    assert await asyncio.to_thread(delete_before, settings.kafka, SEGMENTS, {0: before}) == {0: before}


async def test_a_session_open_across_the_deletion_goes_on_behind_a_new_proxy(
    kafka: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_of(kafka, tmp_path, engine)
    async with running_proxy(settings) as proxy:
        await proxy.generate(await proxy.open("old"), [1, 2])
        opened = await proxy.open("open")
        _, one = await proxy.generate(opened, [1, 2])
    await delete(settings, await asyncio.to_thread(first_of, settings, opened["session_id"]))
    async with running_proxy(settings) as proxy:
        context = [1, 2, *one["output_ids"], 7]
        status, two = await proxy.post(
            f"/s/{opened['token']}/generate", {"input_ids": context, "sampling_params": {"max_new_tokens": 5}}
        )
        assert (status, two["meta_info"]["hoofprint"]["segment_index"]) == (200, 1)
    events = await asyncio.to_thread(log_of, settings, SEGMENTS)
    log = read_log(e for e in events if getattr(e, "session_id", None) == opened["session_id"])
    assert ids_of(log.segments[1].context_ids).tolist() == [7]
    assert log.segments[1].parent_segment_index == 0


@pytest.mark.parametrize("everything", [False, True])
async def test_a_token_whose_beginning_is_gone_gets_410_and_no_shorter_session(
    kafka: str, tmp_path: Path, engine: ScriptedEngine, everything: bool
) -> None:
    settings = settings_of(kafka, tmp_path, engine)
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        for turn in range(3):
            await proxy.generate(opened, [turn])
    events = await asyncio.to_thread(log_of, settings, SEGMENTS)
    await delete(settings, len(events) if everything else 2)
    async with running_proxy(settings) as proxy:
        for path in ("/generate", "/session/finalize"):
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}} if path == "/generate" else {}
            status, refused = await proxy.post(f"/s/{opened['token']}{path}", body)
            assert (status, refused["error"]["code"]) == (410, "trajectory_gone")
            assert "no longer in the log" in refused["error"]["message"]
    after = await asyncio.to_thread(log_of, settings, SEGMENTS)
    kept = 0 if everything else 2
    assert not [e for e in after[len(events) - kept :] if isinstance(e, ev.TokenSegment | ev.TrajectoryEnded)]


async def test_a_named_session_with_a_hole_at_its_beginning_gets_410(
    kafka: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    """No token says where it began; its segments do."""
    settings = settings_of(kafka, tmp_path, engine)
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}
    async with running_proxy(settings) as proxy:
        for turn in range(3):
            assert (await proxy.post("/generate", {**body, "input_ids": [turn]}, **{"X-Session-Id": "s"}))[
                0
            ] == 200
    events = await asyncio.to_thread(log_of, settings, SEGMENTS)
    second = next(i for i, e in enumerate(events) if isinstance(e, ev.TokenSegment) and e.segment_index == 1)
    await delete(settings, second)
    async with running_proxy(settings) as proxy:
        status, refused = await proxy.post("/generate", body, **{"X-Session-Id": "s"})
        assert (status, refused["error"]["code"]) == (410, "trajectory_gone")


async def test_a_named_rollout_of_a_kept_attempt_is_not_begun_again(
    kafka: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_of(kafka, tmp_path, engine)
    headers = {
        "X-Session-Id": "s", "X-Instance-Id": "g", "X-Hoofprint-Attempt": "0", "X-Hoofprint-Sample-Index": "0",
    }  # fmt: skip
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}
    async with running_proxy(settings) as proxy:
        assert (await proxy.post("/generate", body, **headers))[0] == 200
    events = await asyncio.to_thread(log_of, settings, SEGMENTS)
    producer = AckProducer(settings.kafka, "test")
    producer.publish(
        ev.identified(
            ev.Verdict(
                run_id=settings.run.run_id, occurred_at=system_clock(), group_id="g", attempt=0, outcome="kept", reason="",
                cause_offset=0, index=0,
            )
        )
    )  # fmt: skip
    producer.close()
    await delete(settings, len(events))
    async with running_proxy(settings) as proxy:
        status, refused = await proxy.post("/generate", body, **headers)
        assert (status, refused["error"]["code"]) == (410, "trajectory_gone")
