"""Admission, pure: which attempts may go out now, from the facts of the log alone.

The resume position is the set of prompts that were admitted, never a counter: groups finish out of order, stale ones leave
gaps, and a restart must neither skip nor repeat a prompt. Folding the log again gives the same `AdmissionState`, so the
bound after a restart equals the bound before it.

Invariants:
* a prompt of a dataset pass is admitted once; its retries are attempts of the same group;
* retries go before new prompts (their group holds its place already, so that they starve nobody);
* admitted groups without a terminal verdict stay within the limit, whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from schemas import events as ev
from schemas.ids import stable_id


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


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of the bound. `batch_size` counts groups, or sequences of groups of `group_size` trajectories."""

    max_outstanding_groups: int
    batch_size: int
    by: Literal["groups", "sequences"] = "groups"
    group_size: int = 8
    eta: int | None = None

    @property
    def batch_groups(self) -> int:
        """Groups of one optimizer step when every trajectory gives one sequence."""
        return self.batch_size if self.by == "groups" else -(-self.batch_size // self.group_size)


@dataclass(slots=True)
class OpenGroup:
    """An admitted group without a terminal verdict. `running`: no end of its attempt was seen yet."""

    prompt: Prompt
    attempt: int
    running: bool = True
    sequences: int = 0


@dataclass(slots=True)
class AdmissionState:
    """Fold of `control.v1`, verdicts and the end mark. Every method may be told a fact any number of times."""

    run_id: str
    activated: bool = False
    ended: bool = False
    dataset_ended: bool = False
    admitted: dict[int, set[int]] = field(default_factory=dict)
    open_groups: dict[str, OpenGroup] = field(default_factory=dict)
    retries: dict[str, int] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    kept_groups: int = 0
    trained_steps: int = 0
    branch: str = ""
    branches: set[str] = field(default_factory=set)
    open_request: str | None = None
    emitted: set[str] = field(default_factory=set)

    @property
    def admitted_groups(self) -> int:
        """Prompts admitted so far."""
        return sum(map(len, self.admitted.values()))

    def fold(self, event: ev.Event) -> None:
        """Take one event of the run in; what decides nothing here is ignored."""
        if event.run_id != self.run_id or event.kind != "train":
            return
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)

    def on_admitted(self, event: ev.GroupAdmitted) -> None:
        """A place is taken; the prompt is admitted for good."""
        prompt = Prompt(event.dataset_epoch, event.prompt_index)
        self.admitted.setdefault(prompt.dataset_epoch, set()).add(prompt.prompt_index)
        known = self.open_groups.get(event.group_id)
        if event.group_id in self.finished or (known is not None and known.attempt >= event.attempt):
            return
        self.open_groups[event.group_id] = OpenGroup(prompt, event.attempt)
        if self.retries.get(event.group_id, event.attempt + 1) <= event.attempt:
            del self.retries[event.group_id]

    def on_completed(self, event: ev.GroupCompleted) -> None:
        """The attempt runs no longer; its group waits for a verdict."""
        self._attempt_ended(event.group_id, event.attempt, event.sequences)

    def on_failed(self, event: ev.GroupFailed) -> None:
        """The same."""
        self._attempt_ended(event.group_id, event.attempt, 0)

    def _attempt_ended(self, group_id: str, attempt: int, sequences: int) -> None:
        group = self.open_groups.get(group_id)
        if group is not None and group.attempt == attempt and group.running:
            group.running, group.sequences = False, sequences

    def on_batch_requested(self, event: ev.BatchRequested) -> None:
        """The trainer waits for a batch."""
        if event.branch == self.branch and event.batch_id not in self.emitted:
            self.open_request = event.batch_id

    def on_step_completed(self, event: ev.StepCompleted) -> None:
        """v of the bound."""
        if event.branch == self.branch:
            self.trained_steps = max(self.trained_steps, event.step)

    def on_rolled_back(self, event: ev.RolledBack) -> None:
        """Steps after `to_step` were not trained."""
        if event.branch not in self.branches:
            self.branches.add(event.branch)
            self.branch, self.open_request = event.branch, None
            self.trained_steps = min(self.trained_steps, event.to_step)

    def on_activated(self, _event: ev.PolicyActivated) -> None:
        """An engine generates: rollouts can start."""
        self.activated = True

    def on_dataset_ended(self, _event: ev.DatasetEnded) -> None:
        """Said once already."""
        self.dataset_ended = True

    def on_ended(self, _event: ev.RunEnded | ev.EndOfBatches) -> None:
        """Nothing more will be asked for."""
        self.ended = True

    def on_verdict(self, event: ev.Verdict) -> None:
        """Frees the place, or asks for the next attempt."""
        if event.batch_id is not None:
            self.emitted.add(event.batch_id)
            if event.batch_id == self.open_request:
                self.open_request = None
        if event.group_id in self.finished:
            return
        if event.outcome == "retry":
            group = self.open_groups.get(event.group_id)
            if event.next_attempt is not None and (group is None or group.attempt < event.next_attempt):
                self.retries[event.group_id] = event.next_attempt
            return
        self.finished.add(event.group_id)
        self.kept_groups += event.outcome == "kept"
        self.open_groups.pop(event.group_id, None)
        self.retries.pop(event.group_id, None)

    def unrequested(self, requested: set[tuple[str, int]]) -> list[Admission]:
        """Attempts that were admitted and may still run, but whose request never reached the prompts topic."""
        return [
            Admission(group.prompt, group_id, group.attempt)
            for group_id, group in self.open_groups.items()
            if group.running and group_id not in self.retries and (group_id, group.attempt) not in requested
        ]

    def free_places(self, limits: Limits) -> int:
        """How many new groups may be admitted now.

        With `eta`: groups that went or may still go into training are at most (eta + v + 1) * B after v trained steps
        (dropped ones count no longer, or the bound would starve the batch).
        """
        free = limits.max_outstanding_groups - len(self.open_groups)
        if limits.eta is not None:
            bound = (limits.eta + self.trained_steps + 1) * limits.batch_groups
            free = min(free, bound - self.kept_groups - len(self.open_groups))
        if free <= 0:
            return int(self._starves(limits))
        return free

    def _starves(self, limits: Limits) -> bool:
        """A request is open, nothing runs, and what is complete does not fill the batch: with a batch counted in
        sequences, groups that gave fewer than expected would otherwise hold the run for ever."""
        groups = self.open_groups.values()
        if self.open_request is None or self.retries or any(group.running for group in groups):
            return False
        have = len(groups) if limits.by == "groups" else sum(group.sequences for group in groups)
        return have < limits.batch_size

    def next_retries(self) -> list[Admission]:
        """Attempts that a verdict asked for, first asked first."""
        if not self.activated or self.ended:
            return []
        return [
            Admission(self.open_groups[group].prompt, group, attempt)
            for group, attempt in self.retries.items()
            if group in self.open_groups
        ]


_HANDLERS: dict[type[ev.Event], Callable[[AdmissionState, Any], None]] = {
    ev.GroupAdmitted: AdmissionState.on_admitted,
    ev.GroupCompleted: AdmissionState.on_completed,
    ev.GroupFailed: AdmissionState.on_failed,
    ev.Verdict: AdmissionState.on_verdict,
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
