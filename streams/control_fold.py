"""The controller's rules: `fold(state, offset, event) -> effects` over `control.v1`, pure and deterministic.

Rules 1, 2, 3 and 7 of the design, batches on request, and the ends of a run. Every effect copies `occurred_at` from its
cause and carries `(cause_offset, index)`: folding the same log gives the same effects byte for byte, whenever and wherever.

Invariants:
* a record that is read again (same offset) and a fact that is written again (same event id) change nothing: a fact is
  considered once, where it stands first, even if it had no effect there;
* every admitted group that ends has exactly one terminal verdict; `kept` stands directly behind the batch that takes it;
* no batch holds a group outside the window at its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from schemas import events as ev
from schemas.completed_brief import CompletedBrief
from schemas.errors import StalenessExceeded
from schemas.events import BatchGroup, Effect, Event
from schemas.index_set import IndexSet
from schemas.versions import real_version
from schemas.window import VersionWindow, WindowFacts
from streams.control_batches import choose, enough, fills
from streams.control_effects import RecordEffects
from streams.control_state import ControlState, FoldSettings, OpenRequest, PendingGroup, fold_settings
from streams.group_filters import load_filter, needs_facts, refusal

_REJECTED = StalenessExceeded.code
NO_FACTS = WindowFacts(False, -1, 0, ())


def fold(
    state: ControlState, offset: int, event: Event | CompletedBrief, *, quiet: bool = False
) -> list[Effect]:
    """Take one record of `control.v1` into `state` (changed in place) and return what it causes, in order.

    A brief event changes the state as the whole one does. `quiet`: the state changes alike, but the effects are not made: they
    stand in their topics already.
    Raises IncompatibleEvent, with the state as it was, for a RunConfigured whose settings cannot be read, and ConfigError for
    a group filter that is not there or does not work.
    """
    if offset < state.next_offset:
        return []
    if event.run_id != state.run_id:
        state.next_offset, state.last_id = offset + 1, event.event_id
        state.count("other_run")
        return []
    if isinstance(event, ev.RunConfigured):
        _configure(state, event)
    state.next_offset, state.last_id = offset + 1, event.event_id
    if state.settings is None:
        state.ignore("before_configuration", event.event_id)
        return []
    if event.event_id in state.void:
        state.count("repeated_void_events")
        return []
    handler = _HANDLERS.get(type(event))
    if handler is None or event.policy_id != state.policy_id or event.kind != "train":
        return []
    step = _Fold(state, state.settings, offset, event.occurred_at, quiet)
    handler(step, event)
    step.settle()
    return step.effects


def _configure(state: ControlState, event: ev.RunConfigured) -> None:
    """The run's first configuration counts, later ones are its repetitions."""
    if state.settings is not None:
        return
    settings = fold_settings(event)
    if settings.group.filter:
        load_filter(settings.group.filter)
    state.window = VersionWindow(settings.window.keep_versions, settings.window.order)
    state.settings = settings
    state.policy_id = event.policy_id


class _Fold(RecordEffects):
    """One record being folded: the rules, and the effects so far."""

    __slots__ = ("budgeted", "settings")

    def __init__(
        self, state: ControlState, settings: FoldSettings, offset: int, occurred_at: int, quiet: bool
    ) -> None:
        super().__init__(state, offset, occurred_at, quiet)
        self.settings = settings
        self.budgeted = settings.retry.policy == "budget"

    # --- groups ---

    def admitted(self, event: ev.GroupAdmitted) -> None:
        """A new group, or the next attempt of one that was told to retry."""
        state, group = self.state, event.group_id
        if state.retrying.get(group) == event.attempt:
            del state.retrying[group]
            state.running[group] = event.attempt
        elif (
            group in state.running
            or group in state.retrying
            or group in state.pending
            or group in state.finished
        ):
            state.ignore("ignored_admissions", event.event_id)
        else:
            state.count("admitted")
            state.running[group] = event.attempt
            if self.budgeted:
                state.costs.admitted(group, event.prompt_index)
            if state.end_reason is not None:  # it crossed the end on its way into the log
                self.drop(group, event.attempt, state.end_reason, NO_FACTS)

    def completed(self, event: ev.GroupCompleted | CompletedBrief) -> None:
        """Judged on arrival; what may be trained on waits for a batch."""
        if not self._is_first_end(event):
            return
        if isinstance(event, CompletedBrief) and (self.budgeted or needs_facts(self.settings.group)):
            event = event.whole()
        if isinstance(event, CompletedBrief):
            labels: Sequence[str] = event.labels
        else:
            labels = _labels(event.trajectories)
            if self.budgeted:
                self.state.costs.ended(event.group_id, event.attempt, event.trajectories, complete=True)
        versions = self._observe(labels)
        facts = self.state.window.judge(versions)
        if facts.stale:
            self._stale(event.group_id, event.attempt, facts)
        elif (reason := refusal(event, self.settings.group)) is not None:
            self.drop(event.group_id, event.attempt, reason, facts)
        else:
            del self.state.running[event.group_id]
            group = BatchGroup(
                event.group_id,
                event.attempt,
                event.payload,
                event.sequences,
                event.trainable_tokens,
                versions,
            )
            self.state.pending[event.group_id] = PendingGroup(group, versions, self.offset)
            self.state.pending_sequences += event.sequences

    def failed(self, event: ev.GroupFailed) -> None:
        """Its versions advance the window, too; then it is tried again or given up."""
        if not self._is_first_end(event):
            return
        if self.budgeted:
            self.state.costs.ended(event.group_id, event.attempt, event.trajectories, complete=False)
        if rejected := sum(t.reason == _REJECTED for t in event.trajectories):
            self.state.count("rejected_groups")
            self.state.count("rejected_samples", rejected)
        versions = self._observe(_labels(event.trajectories))
        facts = self.state.window.judge(versions)
        self._again(event.group_id, event.attempt, event.reason, facts, event.trajectories)

    def _is_first_end(self, event: ev.GroupCompleted | ev.GroupFailed | CompletedBrief) -> bool:
        """Rule 7: the first terminal event of an attempt wins, and only an admitted attempt has one."""
        state, group = self.state, event.group_id
        if state.running.get(group) == event.attempt:
            return True
        known = (
            group in state.running
            or group in state.retrying
            or group in state.pending
            or group in state.finished
        )
        state.ignore("late_ends" if known else "unknown_groups", event.event_id)
        return False

    def _observe(self, labels: Sequence[str]) -> tuple[str, ...]:
        """Rule 1 labels of a group's trajectories, shown to the window."""
        count = len(labels)
        if count and labels.count(labels[0]) == count:  # most groups are of one version
            versions = (real_version(labels[0]) or "",) * count
        else:
            versions = tuple([real_version(label) or "" for label in labels])
        if self.state.window.observe(versions):
            self._judge_pending()
        return versions

    def _judge_pending(self) -> None:
        """Rule 3: the window advanced, so all that waits is judged again, in completion order."""
        judge = self.state.window.judge
        for entry, facts in [(entry, judge(entry.versions)) for entry in self.state.pending.values()]:
            if facts.stale:
                self._stale(entry.group.group_id, entry.group.attempt, facts)

    def _stale(self, group: str, attempt: int, facts: WindowFacts) -> None:
        if self.settings.group.on_stale == "requeue":
            self._again(group, attempt, "stale", facts)
        else:
            self.drop(group, attempt, "stale", facts)

    def _again(
        self,
        group: str,
        attempt: int,
        reason: str,
        facts: WindowFacts,
        known: Sequence[ev.TrajectoryFacts] = (),
    ) -> None:
        """Retry while there are retries and budget left; a requeued stale group uses them up as well."""
        if attempt >= self.settings.group.max_retries:
            self.drop(group, attempt, "retry_exhausted", facts)
            return
        costs = self.state.costs
        if self.budgeted and not costs.take(group, costs.expected(group, known), self.settings.retry.share):
            self.drop(group, attempt, "retry_cost", facts)
            return
        self._leave(group)
        self.state.retrying[group] = attempt + 1
        self.verdict(group, attempt, "retry", reason, facts, next_attempt=attempt + 1)

    def drop(self, group: str, attempt: int, reason: str, facts: WindowFacts) -> None:
        """Terminal."""
        self._finish(group)
        self.verdict(group, attempt, "dropped", reason, facts)

    def _finish(self, group: str) -> None:
        """A terminal verdict follows."""
        self._leave(group)
        self.state.finished.add(group)
        if self.budgeted:
            self.state.costs.left(group)

    def _leave(self, group: str) -> PendingGroup | None:
        """Take a group out of wherever it stands."""
        self.state.running.pop(group, None)
        self.state.retrying.pop(group, None)
        entry = self.state.pending.pop(group, None)
        if entry is not None:
            self.state.pending_sequences -= entry.group.sequences
        return entry

    # --- versions and requests ---

    def published(self, event: ev.PolicyPublished) -> None:
        """A published version counts as current from here on, before any group of it completed."""
        if self.state.window.publish(event.version):
            self._judge_pending()

    def requested(self, event: ev.BatchRequested) -> None:
        """The trainer waits for one batch at a time; a request of a branch that does not survive is void.

        Every step of a branch is asked for once: a trainer that repeats its request after a restart opens nothing again.
        """
        state = self.state
        steps = state.requested.setdefault(event.branch, IndexSet())
        if event.step in steps or event.branch != state.branch or state.end_reason is not None:
            state.ignore("ignored_requests", event.event_id)
            return
        steps.add(event.step)
        state.request = OpenRequest(event.batch_id, event.step)

    def rolled_back(self, event: ev.RolledBack) -> None:
        """Another branch goes on. Batches that were emitted stay recorded, the trainer takes them from there; the request
        that was still open is void, or a batch would come out that no surviving weights have seen."""
        if event.branch in self.state.branches:
            return
        self.state.branches[event.branch] = None
        self.state.branch = event.branch
        self.state.request = None

    # --- ends ---

    def dataset_ended(self, _event: ev.DatasetEnded) -> None:
        """No new groups; retries still come."""
        self.state.dataset_ended = True

    def run_ended(self, _event: ev.RunEnded) -> None:
        """Every open group is dropped, in a fixed order."""
        state = self.state
        for entry in list(state.pending.values()):
            facts = state.window.judge(entry.versions)
            self.drop(entry.group.group_id, entry.group.attempt, "run_ended", facts)
        for group, attempt in [*state.running.items(), *state.retrying.items()]:
            self.drop(group, attempt, "run_ended", NO_FACTS)
        self._end("run_ended")

    def _end(self, reason: str) -> None:
        if self.state.end_reason is None:
            self.state.end_reason = reason
            self.state.request = None
            self.emit(ev.EndOfBatches, steps=self.state.steps, reason=reason)

    def settle(self) -> None:
        """What the record made possible: batches, and the end of the dataset."""
        state = self.state
        if state.request is not None and enough(state, self.settings.batch):
            self._emit_batch(short=False)
        if (
            not state.dataset_ended
            or state.end_reason is not None
            or state.running
            or state.retrying
            or enough(state, self.settings.batch)
        ):
            return
        if state.pending and self.settings.batch.short_last:
            if state.request is None:
                return
            self._emit_batch(short=True)
        for entry in list(state.pending.values()):
            facts = state.window.judge(entry.versions)
            self.drop(entry.group.group_id, entry.group.attempt, "dataset_ended", facts)
        self._end("dataset_ended")

    # --- batches ---

    def _emit_batch(self, *, short: bool) -> None:
        """The open request gets its groups: they are judged once more, then comes the batch, then their `kept`."""
        state, request = self.state, self.state.request
        chosen, stale = choose(state, self.settings.batch)
        for entry, facts in stale:
            self._stale(entry.group.group_id, entry.group.attempt, facts)
        if request is None or not chosen or not (short or fills(chosen, self.settings.batch)):
            return
        self.batch(request, chosen, short=short)
        state.request = None
        state.steps += 1
        for entry, facts in chosen:
            group = entry.group
            self._finish(group.group_id)
            self.verdict(group.group_id, group.attempt, "kept", "trained", facts, batch_id=request.batch_id)


def _labels(trajectories: Sequence[ev.TrajectoryFacts]) -> list[str]:
    """A trajectory without an id neither advances the window nor drops the group (W6)."""
    return [t.version if t.parent_traj_id else "" for t in trajectories]


# StepCompleted, PolicyActivated and Alarm decide nothing here: a step's batch left when it was requested.
_HANDLERS: dict[type[Event | CompletedBrief], Callable[[_Fold, Any], None]] = {
    ev.GroupAdmitted: _Fold.admitted,
    ev.GroupCompleted: _Fold.completed,
    CompletedBrief: _Fold.completed,
    ev.GroupFailed: _Fold.failed,
    ev.PolicyPublished: _Fold.published,
    ev.BatchRequested: _Fold.requested,
    ev.RolledBack: _Fold.rolled_back,
    ev.DatasetEnded: _Fold.dataset_ended,
    ev.RunEnded: _Fold.run_ended,
}
