"""What the trainer knows from the log: a fold of `control.v1` and `train.batches.v1`.

Everything the trainer decides at a restart it decides from this view and its checkpoints
(`trainer.recovery`), never from memory. Repeats of an event are harmless: the first one with an identity
counts.

After `RolledBack(to_step, branch)` the steps behind `to_step` are no longer part of the history: they will be
completed again, under the branch. Their recorded batches stay and are used again, so a step has one batch for
ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.errors import InvariantBroken
from schemas.events import (
    BatchRequested,
    EndOfBatches,
    Event,
    PolicyActivated,
    PolicyPublished,
    RolledBack,
    RunEnded,
    StepCompleted,
    TrainBatch,
)


def version_label(step: int, branch: str) -> str:
    """Label of the weights after `step` optimizer steps."""
    return f"v{step:06d}-{branch}" if branch else f"v{step:06d}"


@dataclass(slots=True)
class ControlView:
    """State of the fold for one run and one policy."""

    run_id: str
    policy_id: str = "main"
    ordinals: dict[str, int] = field(default_factory=dict)
    published: dict[str, PolicyPublished] = field(default_factory=dict)
    active: dict[str, str] = field(default_factory=dict)  # engine_id: the version it generates with
    activated: set[str] = field(default_factory=set)
    completed: dict[int, StepCompleted] = field(default_factory=dict)
    batches: dict[int, TrainBatch] = field(default_factory=dict)
    requested: set[tuple[int, str]] = field(default_factory=set)  # step, branch
    branch: str = ""
    rollbacks: int = 0
    end_of_batches: bool = False
    run_ended: bool = False

    def apply(self, event: Event) -> None:
        """Take in one event; those of other runs, other policies and other kinds change nothing."""
        if event.run_id != self.run_id or event.policy_id != self.policy_id:
            return
        match event:
            case PolicyPublished():
                if event.version not in self.ordinals:
                    self.ordinals[event.version] = len(self.ordinals)
                    self.published[event.version] = event
            case PolicyActivated():
                self.active[event.engine_id] = event.version
                self.activated.add(event.version)
            case StepCompleted():
                self._complete(event)
            case RolledBack():
                self._roll_back(event)
            case BatchRequested():
                self.requested.add((event.step, event.branch))
            case TrainBatch():
                self.batches.setdefault(event.step, event)
            case EndOfBatches():
                self.end_of_batches = True
            case RunEnded():
                self.run_ended = True
            case _:
                pass

    @property
    def last_step(self) -> int:
        """The newest step of the surviving history; 0 before the first."""
        return max(self.completed, default=0)

    def label(self, step: int) -> str:
        """Label of the surviving weights after `step`: under the branch on which that step was completed."""
        done = self.completed.get(step)
        return version_label(step, done.branch if done is not None else self.branch if step else "")

    def needs_request(self, step: int) -> bool:
        """Whether the batch of `step` has still to be asked for.

        A rollback voids the request that was open: without a batch for it, it is repeated on the new branch.
        """
        if not any(requested == step for requested, _ in self.requested):
            return True
        return step not in self.batches and (step, self.branch) not in self.requested

    def ordinal(self, label: str) -> int:
        """Rank of a published label. InvariantBroken if it was never published."""
        if label not in self.ordinals:
            raise InvariantBroken("a version was trained on before it was published", version=label)
        return self.ordinals[label]

    def _complete(self, event: StepCompleted) -> None:
        if event.branch != self.branch and event.step not in self.completed:
            return  # a late repeat from a branch that was given up
        self.completed.setdefault(event.step, event)

    def _roll_back(self, event: RolledBack) -> None:
        if event.branch == self.branch:
            return
        self.branch = event.branch
        self.rollbacks += 1
        self.completed = {step: done for step, done in self.completed.items() if step <= event.to_step}
