"""Plays one group attempt: all its trajectories at once, each opened, run and finalized.

Whatever happens inside one trajectory is its end: refusals were recorded by the proxy, a time-out and an agent's
exception are finalized as failed. Only a closed attempt stops the siblings.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from rollout.agent_api import Agent, Finish, Task
from rollout.client import ProxyClient, Session
from rollout.persistence import AttemptClosed, CallFailed, ProxyAway, TrajectoryRefused
from schemas.ids import stable_id

log = structlog.get_logger(__name__)

Outcome = Literal["finished", "refused", "failed", "unreachable"]


@dataclass(frozen=True, slots=True)
class GroupAttempt:
    """What is to be played."""

    run_id: str
    group_id: str
    attempt: int
    size: int
    prompt: Mapping[str, Any]

    def seed(self, sample_index: int) -> int:
        """A number of its own for every trajectory, the same at every try of it."""
        return int(stable_id(self.run_id, self.group_id, self.attempt, sample_index)[:15], 16)


class GroupPlayer:
    """Runs group attempts with one agent through one proxy."""

    def __init__(self, client: ProxyClient, agent: Agent, timeout_s: float) -> None:
        self._client = client
        self._agent = agent
        self._timeout_s = timeout_s

    async def play(self, group: GroupAttempt) -> Counter[Outcome]:
        """How the trajectories ended. AttemptClosed: the rest was cancelled. A cancelled call cancels them all."""
        ends: Counter[Outcome] = Counter()
        try:
            async with asyncio.TaskGroup() as tasks:
                plays = [tasks.create_task(self._trajectory(group, i)) for i in range(group.size)]
        except* AttemptClosed as closed:
            raise closed.exceptions[0] from None
        ends.update(play.result() for play in plays)
        return ends

    async def _trajectory(self, group: GroupAttempt, sample_index: int) -> Outcome:
        try:
            session = await self._client.open(group.group_id, group.attempt, sample_index, restart=True)
            finish, detail = await self._finish_of(group, sample_index, session)
            await session.finalize(finish, detail)
        except TrajectoryRefused as refused:
            log.info(
                "trajectory_refused", group_id=group.group_id, sample_index=sample_index, **refused.detail
            )
            return "refused"
        except (ProxyAway, CallFailed) as lost:
            # without an end the assembler's time-out fails the attempt, and the feeder asks for another one
            log.warning(
                "trajectory_without_end", group_id=group.group_id, sample_index=sample_index, **lost.detail
            )
            return "unreachable"
        return "failed" if finish.status == "failed" else "finished"

    async def _finish_of(
        self, group: GroupAttempt, sample_index: int, session: Session
    ) -> tuple[Finish, str | None]:
        task = Task(group.prompt, sample_index, group.seed(sample_index), session)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await self._agent(task), None
        except (AttemptClosed, TrajectoryRefused):
            raise
        except Exception as wrong:  # foreign code: whatever it raises is its trajectory's end
            if isinstance(wrong, TimeoutError) and limit.expired():
                return Finish(None, status="failed", reason="timeout"), f"after {self._timeout_s:g} s"
            log.warning("agent_error", group_id=group.group_id, sample_index=sample_index, exc_info=wrong)
            return Finish(None, status="failed", reason="agent_error"), f"{type(wrong).__name__}: {wrong}"
