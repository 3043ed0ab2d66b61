from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollout.agent_api import Finish, Task
from rollout.answers import AnswerLog
from rollout.client import ProxyClient
from rollout.group_run import GroupAttempt, GroupPlayer
from rollout.persistence import AttemptClosed

GROUP = GroupAttempt("r", "g", 0, 4, {"seed": 1})


@pytest.fixture
async def client(answering_proxy: Any, tmp_path: Path) -> AsyncIterator[ProxyClient]:
    made = ProxyClient(answering_proxy.url, AnswerLog(tmp_path / "answers.jsonl"), patience_s=1.0)
    yield made
    await made.close()


async def good(task: Task) -> Finish:
    await task.session.generate([1], {})
    return Finish(float(task.sample_index))


async def broken_for_sample_two(task: Task) -> Finish:
    if task.sample_index == 2:
        raise ValueError("no such tool")
    return await good(task)


async def hanging(task: Task) -> Finish:
    await asyncio.Event().wait()
    return await good(task)


async def test_all_samples_are_opened_afresh_and_finalized(client: ProxyClient, answering_proxy: Any) -> None:
    assert await GroupPlayer(client, good, 10.0).play(GROUP) == {"finished": 4}
    assert sorted(o["sample_index"] for o in answering_proxy.opened) == [0, 1, 2, 3]
    assert all(o["restart"] for o in answering_proxy.opened)
    assert sorted(f["reward"] for f in answering_proxy.finalized) == [0.0, 1.0, 2.0, 3.0]


async def test_a_failed_agent_is_the_end_of_its_trajectory_alone(
    client: ProxyClient, answering_proxy: Any
) -> None:
    assert await GroupPlayer(client, broken_for_sample_two, 10.0).play(GROUP) == {"finished": 3, "failed": 1}
    (failed,) = [f for f in answering_proxy.finalized if f["status"] == "failed"]
    assert (failed["session_id"], failed["reason"]) == ("t-g-0-2", "agent_error")
    assert failed["detail"] == "ValueError: no such tool"
    assert failed["reward_pending"] is False


async def test_a_trajectory_without_end_times_out(client: ProxyClient, answering_proxy: Any) -> None:
    assert await GroupPlayer(client, hanging, 0.05).play(GROUP) == {"failed": 4}
    assert {f["reason"] for f in answering_proxy.finalized} == {"timeout"}


async def test_a_closed_attempt_cancels_the_siblings(client: ProxyClient, answering_proxy: Any) -> None:
    answering_proxy.misbehave.append(("generate", 410, "trajectory_gone"))
    with pytest.raises(AttemptClosed):
        await GroupPlayer(client, one_asks_the_others_wait, 10.0).play(GROUP)
    assert answering_proxy.finalized == []


async def one_asks_the_others_wait(task: Task) -> Finish:
    return await (good(task) if task.sample_index == 0 else hanging(task))


async def test_a_refused_trajectory_needs_no_end_of_ours(client: ProxyClient, answering_proxy: Any) -> None:
    answering_proxy.misbehave.append(("generate", 502, "partial_rollout_staleness_exceeded"))
    assert await GroupPlayer(client, good, 10.0).play(GROUP) == {"refused": 1, "finished": 3}
    assert len(answering_proxy.finalized) == 3


def test_every_trajectory_has_its_own_seed() -> None:
    retry = GroupAttempt("r", "g", 1, 4, {})
    assert len({g.seed(i) for g in (GROUP, retry) for i in range(4)}) == 8
    assert GROUP.seed(3) == GROUP.seed(3)
