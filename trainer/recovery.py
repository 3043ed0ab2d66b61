"""Where to go on after a restart (design §5, "Trainer step"): a pure decision from the log and the
checkpoints.

A checkpoint fits the surviving history if it is that history's state after its step (same digest), or if it
is one ahead of the log: trained, durable, but its `StepCompleted` was not sent. The newest fitting one is
taken:
* one ahead: its `StepCompleted` is published now, from what the checkpoint carries;
* equal: go on;
* behind (checkpoints every K steps, or a lost one): the steps in between are trained again from the recorded
  batches and must give the recorded digests.
With no fitting checkpoint the initial weights are the state after step 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import InvariantBroken


@dataclass(frozen=True, slots=True)
class CheckpointFact:
    """What a checkpoint says of itself. `parent_digest`: the weights its step started from."""

    path: Path
    step: int
    branch: str
    digest: str
    parent_digest: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Load `checkpoint` (None.

    The initial weights), announce its step if the log lacks it, train `again` steps.
    """

    checkpoint: CheckpointFact | None
    announce: bool
    again: tuple[int, ...]


def plan_recovery(
    digests: Mapping[int, str], initial_digest: str, branch: str, checkpoints: Iterable[CheckpointFact]
) -> Plan:
    """`digests`: of the surviving completed steps. `branch`: on which the next step will be.

    InvariantBroken when a checkpoint of this branch is more than one step ahead: the log has lost events, and
    going on would train batches twice.
    """
    last = max(digests, default=0)
    history = {0: initial_digest} | dict(digests)
    found = sorted(checkpoints, key=lambda checkpoint: checkpoint.step, reverse=True)
    for checkpoint in found:
        if checkpoint.step > last + 1 and checkpoint.branch == branch:
            raise InvariantBroken(
                "a checkpoint is ahead of the log by more than one step",
                checkpoint_step=checkpoint.step,
                completed_step=last,
            )
    for checkpoint in found:
        if _is_one_ahead(checkpoint, last, history[last], branch):
            return Plan(checkpoint, announce=True, again=())
        if history.get(checkpoint.step) == checkpoint.digest:
            return Plan(checkpoint, announce=False, again=tuple(range(checkpoint.step + 1, last + 1)))
    return Plan(None, announce=False, again=tuple(range(1, last + 1)))


def _is_one_ahead(checkpoint: CheckpointFact, last: int, digest: str, branch: str) -> bool:
    return checkpoint.step == last + 1 and checkpoint.branch == branch and checkpoint.parent_digest == digest
