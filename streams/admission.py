"""Admission, pure: what the log says about prompts, attempts, batches and versions. How many new groups that allows stands
in `admission_bounds`.

The resume position is the set of prompts that were admitted, never a counter: groups finish out of order, stale ones leave
gaps, and a restart must neither skip nor repeat a prompt. Folding the log again gives the same `AdmissionState`, so the
bound after a restart equals the bound before it.

Invariants:
* a prompt of a dataset pass is admitted once; its retries are attempts of the same group;
* retries go before new prompts. Their group holds its place already and has at most `max_retries` of them, so that a place
  comes free after `max_retries + 1` attempts whatever fails: nobody is starved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas import events as ev
from schemas.completed_brief import CompletedBrief
from schemas.ids import stable_id
from schemas.index_set import GroupSet, IndexSet
from schemas.versions import real_version
from streams.trainer_pace import TrainerPace

_ADMISSIONS_KEPT = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """Place of a prompt: pass over the dataset, and index in it."""

    dataset_epoch: int
    prompt_index: int


@dataclass(frozen=True, slots=True)
class Admission:
    """One attempt to admit and request."""

    prompt: Prompt
    group_id: str | None
    attempt: int


@dataclass(slots=True)
class OpenGroup:
    """An admitted group without a terminal verdict. `running`: no end of its attempt was seen yet.

    `ordinal`: no trajectory of the attempt is older. At its admission the version that engines had then, once it is
    complete the oldest of its trajectories' versions.
    """

    prompt: Prompt
    attempt: int
    admitted_at: int
    ordinal: int = 0
    running: bool = True
    sequences: int = 0


@dataclass(slots=True)
class AdmissionState:
    """Fold of `control.v1`, verdicts and batches. Every method may be told a fact any number of times.

    `new_at`: when the newest groups were admitted first. `ordinals`: of published versions. `published_steps`: the newest step
    whose version was published, on the branch that survives. `asked_step`: the newest that a batch was asked for there.
    """

    run_id: str
    activated: bool = False
    ended: bool = False
    dataset_ended: bool = False
    admitted: dict[int, IndexSet] = field(default_factory=dict)
    open_groups: dict[str, OpenGroup] = field(default_factory=dict)
    retries: dict[str, int] = field(default_factory=dict)
    finished: GroupSet = field(default_factory=lambda: GroupSet(""))
    kept_groups: int = 0
    dropped_groups: int = 0
    new_at: deque[int] = field(default_factory=lambda: deque(maxlen=_ADMISSIONS_KEPT))
    trained_steps: int = 0
    ordinals: dict[str, int] = field(default_factory=dict)
    active: str | None = None
    published_steps: int = 0
    pace: TrainerPace = field(default_factory=TrainerPace)
    branch: str = ""
    branches: set[str] = field(default_factory=set)
    open_request: str | None = None
    asked_step: int = 0
    emitted: set[str] = field(default_factory=set)
    activations: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.finished.run_id = self.run_id

    @property
    def admitted_groups(self) -> int:
        """Prompts admitted so far."""
        return sum(map(len, self.admitted.values()))

    def fold(self, event: ev.Event | CompletedBrief) -> None:
        """Take one event of the run in; what decides nothing here is ignored."""
        if event.run_id != self.run_id or event.kind != "train":
            return
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)

    def on_admitted(self, event: ev.GroupAdmitted) -> None:
        """A place is taken; the prompt is admitted for good."""
        prompt = Prompt(event.dataset_epoch, event.prompt_index)
        self.admitted.setdefault(prompt.dataset_epoch, IndexSet()).add(prompt.prompt_index)
        known = self.open_groups.get(event.group_id)
        if event.group_id in self.finished or (known is not None and known.attempt >= event.attempt):
            return
        if event.attempt == 0:
            self.new_at.append(event.occurred_at)
        self.open_groups[event.group_id] = OpenGroup(
            prompt, event.attempt, event.occurred_at, self.active_ordinal
        )
        if self.retries.get(event.group_id, event.attempt + 1) <= event.attempt:
            del self.retries[event.group_id]

    def on_completed(self, event: ev.GroupCompleted | CompletedBrief) -> None:
        """The attempt runs no longer; its group waits for a verdict."""
        labels = (
            event.labels if isinstance(event, CompletedBrief) else [t.version for t in event.trajectories]
        )
        ordinals = [self.ordinals.get(real_version(label) or "") for label in set(labels)]
        known = [ordinal for ordinal in ordinals if ordinal is not None]
        self._attempt_ended(event.group_id, event.attempt, event.sequences, min(known, default=0))

    def on_failed(self, event: ev.GroupFailed) -> None:
        """The same."""
        self._attempt_ended(event.group_id, event.attempt, 0)

    def _attempt_ended(self, group_id: str, attempt: int, sequences: int, ordinal: int = 0) -> None:
        group = self.open_groups.get(group_id)
        if group is not None and group.attempt == attempt and group.running:
            group.running, group.sequences = False, sequences
            group.ordinal = max(group.ordinal, ordinal)

    def on_batch_requested(self, event: ev.BatchRequested) -> None:
        """The trainer waits for a batch."""
        self.pace.asked(event.branch, event.step, event.occurred_at)
        if event.branch != self.branch or event.step < self.asked_step:
            return
        self.asked_step = event.step
        if event.batch_id not in self.emitted:
            self.open_request = event.batch_id

    def on_batch(self, event: ev.TrainBatch) -> None:
        """The request is answered."""
        self.pace.began(event.branch, event.step, event.occurred_at)
        self._answered(event.batch_id)

    def _answered(self, batch_id: str) -> None:
        self.emitted.add(batch_id)
        if batch_id == self.open_request:
            self.open_request = None

    def on_step_completed(self, event: ev.StepCompleted) -> None:
        """v of the bound."""
        if event.branch == self.branch:
            self.trained_steps = max(self.trained_steps, event.step)

    def on_rolled_back(self, event: ev.RolledBack) -> None:
        """Steps after `to_step` were not trained."""
        if event.branch not in self.branches:
            self.branches.add(event.branch)
            self.branch, self.open_request, self.asked_step = event.branch, None, 0
            self.trained_steps = min(self.trained_steps, event.to_step)
            self.published_steps = min(self.published_steps, event.to_step)

    def on_published(self, event: ev.PolicyPublished) -> None:
        """The next ordinal, once per label. A trainer that does not say its step publishes one version per step."""
        real = real_version(event.version)
        if real is None or real in self.ordinals:
            return
        self.ordinals[real] = len(self.ordinals)
        if event.branch == self.branch:
            said = event.step if event.step is not None else self.ordinals[real]
            self.published_steps = max(self.published_steps, said)

    def on_activated(self, event: ev.PolicyActivated) -> None:
        """An engine generates: rollouts can start. All engines change within one pause, so the last one speaks for all."""
        if event.event_id in self.activations:
            return
        self.activations.add(event.event_id)
        self.activated = True
        self.active = real_version(event.version)

    @property
    def active_ordinal(self) -> int:
        """Of the version that engines have; 0 for a label that nobody published."""
        return self.ordinals.get(self.active or "", 0)

    @property
    def coming_ordinal(self) -> int:
        """Of the newest version once every batch that was emitted is trained and published."""
        return len(self.ordinals) - 1 + max(0, len(self.emitted) - self.published_steps)

    def on_dataset_ended(self, _event: ev.DatasetEnded) -> None:
        """Said once already."""
        self.dataset_ended = True

    def on_ended(self, _event: ev.RunEnded | ev.EndOfBatches) -> None:
        """Nothing more will be asked for."""
        self.ended = True

    def on_verdict(self, event: ev.Verdict) -> None:
        """Frees the place, or asks for the next attempt."""
        if event.batch_id is not None:
            self._answered(event.batch_id)
        if event.group_id in self.finished:
            return
        if event.outcome == "retry":
            group = self.open_groups.get(event.group_id)
            asked = max(self.retries.get(event.group_id, 0), group.attempt if group is not None else 0)
            if event.next_attempt is not None and event.next_attempt > asked:
                self.retries[event.group_id] = event.next_attempt
            return
        self.finished.add(event.group_id)
        self.kept_groups += event.outcome == "kept"
        self.dropped_groups += event.outcome == "dropped"
        self.open_groups.pop(event.group_id, None)
        self.retries.pop(event.group_id, None)

    def unrequested(self, requested: set[tuple[str, int]]) -> list[Admission]:
        """Attempts that were admitted and may still run, but whose request never reached the prompts topic."""
        return [
            Admission(group.prompt, group_id, group.attempt)
            for group_id, group in self.open_groups.items()
            if group.running and group_id not in self.retries and (group_id, group.attempt) not in requested
        ]

    def next_retries(self) -> list[Admission]:
        """Attempts that a verdict asked for, first asked first."""
        if not self.activated or self.ended:
            return []
        return [
            Admission(self.open_groups[group].prompt, group, attempt)
            for group, attempt in self.retries.items()
            if group in self.open_groups
        ]


_HANDLERS: dict[type[ev.Event | CompletedBrief], Callable[[AdmissionState, Any], None]] = {
    ev.GroupAdmitted: AdmissionState.on_admitted,
    ev.GroupCompleted: AdmissionState.on_completed,
    CompletedBrief: AdmissionState.on_completed,
    ev.GroupFailed: AdmissionState.on_failed,
    ev.Verdict: AdmissionState.on_verdict,
    ev.TrainBatch: AdmissionState.on_batch,
    ev.PolicyPublished: AdmissionState.on_published,
    ev.BatchRequested: AdmissionState.on_batch_requested,
    ev.StepCompleted: AdmissionState.on_step_completed,
    ev.RolledBack: AdmissionState.on_rolled_back,
    ev.PolicyActivated: AdmissionState.on_activated,
    ev.DatasetEnded: AdmissionState.on_dataset_ended,
    ev.RunEnded: AdmissionState.on_ended,
    ev.EndOfBatches: AdmissionState.on_ended,
}


class PromptOrder:
    """Prompts of all passes in the order in which they are admitted; a pass is shuffled by seed and pass.

    The order is by hash, not by a random generator whose sequence another library version may change: a run resumes
    with the same order years later.
    """

    def __init__(self, size: int, epochs: int, *, shuffle: bool, seed: int) -> None:
        self.size = size
        self.epochs = epochs
        self.shuffle = shuffle
        self.seed = seed

    def of_epoch(self, epoch: int) -> Sequence[int]:
        """Permutation of `range(size)`."""
        if not self.shuffle:
            return range(self.size)
        return sorted(range(self.size), key=lambda index: stable_id("shuffle", self.seed, epoch, index))

    def remaining(self, state: AdmissionState) -> Iterator[Prompt]:
        """Prompts that the log does not show as admitted, lazily: what is admitted meanwhile is left out, too."""
        epoch = 0
        while self.size and (self.epochs == 0 or epoch < self.epochs):
            if len(state.admitted.get(epoch, ())) < self.size:
                for index in self.of_epoch(epoch):
                    if index not in state.admitted.get(epoch, ()):
                        yield Prompt(epoch, index)
            epoch += 1
