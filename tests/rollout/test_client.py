from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.agent_api import Finish
from rollout.answers import AnswerLog
from rollout.client import ProxyClient, failure_of
from rollout.persistence import AttemptClosed, CallFailed, ProxyAway, TrajectoryRefused

PARAMS = {"max_new_tokens": 3}


@pytest.fixture
async def client(answering_proxy: Any, tmp_path: Path) -> AsyncIterator[ProxyClient]:
    made = ProxyClient(answering_proxy.url, AnswerLog(tmp_path / "answers.jsonl"), patience_s=2.0)
    yield made
    await made.close()


async def test_open_generate_finalize(client: ProxyClient, answering_proxy: Any) -> None:
    session = await client.open("g", 1, 2, restart=True)
    answer = await session.generate([7, 8], PARAMS, return_logprob=True)
    await session.finalize(Finish(0.5, components={"a": 1.0}))
    assert opened_by(answering_proxy) == {
        "kind": "train", "group_id": "g", "attempt": 1, "sample_index": 2, "restart": True,
    }  # fmt: skip
    assert (answer.output_ids, answer.logprobs, answer.finish_reason) == (
        [1, 2, 3],
        [-0.5, -0.25, -1.0],
        "stop",
    )
    assert answering_proxy.finalized == [
        {
            "session_id": "t-g-1-2", "status": "completed", "reason": "done", "reward": 0.5,
            "reward_pending": False, "components": {"a": 1.0},
        }
    ]  # fmt: skip


def opened_by(double: Any) -> dict[str, object]:
    (opened,) = double.opened
    return dict(opened)


async def test_an_answer_is_logged_with_its_digest(client: ProxyClient, tmp_path: Path) -> None:
    session = await client.open("g", 1, 2)
    await session.generate([7, 8], PARAMS)
    session.received_text("ä", {"parent_traj_id": "t", "segment_index": 4})
    ids, text = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert ids == {
        "parent_traj_id": "t", "segment_index": 0, "group_id": "g", "attempt": 1, "kind": "ids",
        "digest": hashlib.sha256(np.array([1, 2, 3], "<i4").tobytes()).hexdigest(),
    }  # fmt: skip
    assert text["digest"] == hashlib.sha256("ä".encode()).hexdigest()
    assert (text["kind"], text["text"], text["segment_index"]) == ("text", "ä", 4)


async def test_a_restarting_proxy_is_asked_again(client: ProxyClient, answering_proxy: Any) -> None:
    session = await client.open("g", 0, 0)
    answering_proxy.misbehave += [
        ("generate", 503, "publish_timeout"), ("generate", 404, "unknown_session"), ("finalize", 503, "overloaded"),
    ]  # fmt: skip
    assert (await session.generate([7], PARAMS)).output_ids == [1, 2, 3]
    await session.finalize(Finish(1.0))
    assert answering_proxy.calls == {"sessions": 1, "generate": 3, "finalize": 2}


async def test_a_closed_attempt(client: ProxyClient, answering_proxy: Any) -> None:
    session = await client.open("g", 0, 0)
    answering_proxy.misbehave.append(("generate", 410, "trajectory_gone"))
    with pytest.raises(AttemptClosed):
        await session.generate([7], PARAMS)


async def test_a_refused_trajectory(client: ProxyClient, answering_proxy: Any) -> None:
    session = await client.open("g", 0, 0)
    answering_proxy.misbehave.append(("generate", 502, "partial_rollout_staleness_exceeded"))
    with pytest.raises(TrajectoryRefused) as refused:
        await session.generate([7], PARAMS)
    assert refused.value.detail["code"] == "partial_rollout_staleness_exceeded"


async def test_no_proxy_at_all(tmp_path: Path, unused_tcp_port: int) -> None:
    client = ProxyClient(f"http://127.0.0.1:{unused_tcp_port}", AnswerLog(tmp_path / "a"), patience_s=0.2)
    with pytest.raises(ProxyAway):
        await client.open("g", 0, 0)
    await client.close()


@pytest.mark.parametrize(
    ("raw", "code", "message"),
    [
        (b'{"error": {"code": "overloaded", "message": "later"}}', "overloaded", "later"),
        (b'{"error": {"type": "invalid_request_error", "message": "no"}}', "invalid_request_error", "no"),
        (b'{"code": "config_error", "message": "no"}', "config_error", "no"),
        (b'{"error": "a string"}', "", "a string"),
        (b"<html>", "", "b'<html>'"),
    ],
)
def test_every_shape_of_error_is_understood(raw: bytes, code: str, message: str) -> None:
    failure = failure_of(400, raw, None)
    assert isinstance(failure, CallFailed)
    assert (failure.reply_code, failure.message) == (code, message)


@pytest.mark.parametrize(
    ("header", "seconds"), [("1.5", 1.5), (None, None), ("Wed, 21 Oct 2026 07:28:00 GMT", None)]
)
def test_retry_after(header: str | None, seconds: float | None) -> None:
    assert failure_of(429, b"{}", header).retry_after_s == seconds
