"""Dressage's `staleness/...` numbers, from the events and effects of `control.v1` as the controller meets them.

Gaps, spans and the parts of the lag are those of the newest batch's trajectories, from the first batch on after a start: the
fold needs none of this, so that it is kept beside it. The counts come from the fold's state and are of the whole log. A
trajectory's lag is that of its version; `hoofprint sql RUN lag_split` tells it by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from journal.metrics_http import Number
from schemas import events as ev
from schemas.events import Effect, Event
from schemas.metric_names import MetricName
from schemas.versions import distinct_real
from streams.control_state import ControlState


class _Complete(NamedTuple):
    """A group when it completed: per trajectory its versions and its versions behind the newest; the newest by index."""

    spans: tuple[int, ...]
    behind: tuple[int, ...]
    newest: int


class StalenessNumbers:
    """Told about every record, in log order."""

    def __init__(self) -> None:
        self._complete: dict[str, _Complete] = {}
        self._batch: list[_Complete] = []
        self._batch_id = ""
        self._emitted_at = 0
        self._at_training = 0
        self._gaps: list[tuple[int, int, float]] = []

    def told(self, event: Event, effects: Sequence[Effect], state: ControlState) -> None:
        """One record, what it caused, and the state behind it."""
        newest = state.window.current_index
        if isinstance(event, ev.GroupCompleted):
            self._complete.setdefault(event.group_id, _as_complete(event, state))
        elif isinstance(event, ev.StepCompleted) and event.batch_id == self._batch_id:
            self._at_training = newest - self._emitted_at
        for effect in effects:
            self._caused(effect, newest)
        if isinstance(event, ev.GroupCompleted) and event.group_id not in state.pending:
            self._complete.pop(event.group_id, None)  # a late end has no verdict that would take it away

    def _caused(self, effect: Effect, newest: int) -> None:
        if isinstance(effect, ev.TrainBatch):
            self._gaps, self._batch_id, self._emitted_at = [], effect.batch_id, newest
            known = (self._complete.get(group.group_id) for group in effect.groups)
            self._batch = [group for group in known if group is not None]
        elif isinstance(effect, ev.Verdict):
            if effect.outcome == "kept":
                self._gaps.append((effect.gap_min, effect.gap_max, effect.gap_mean))
            self._complete.pop(effect.group_id, None)

    def numbers(self, state: ControlState) -> Iterator[Number]:
        """What a scrape shows; a window that is off has none (W1)."""
        if not state.window.keep_versions:
            return
        stale = state.counters.get("dropped:stale", 0) + state.counters.get("retry:stale", 0)
        yield Number("staleness/dropped_groups", stale)
        yield Number("staleness/current_version_index", state.window.current_index)
        yield Number("staleness/cutoff_version_index", state.window.cutoff_index)
        for what in ("groups", "samples"):
            name: MetricName = f"staleness/partial_rollout_rejected_{what}"  # type: ignore[assignment]
            yield Number(name, state.counters.get(f"rejected_{what}", 0))
        if gaps := list(self._gaps):
            yield Number("staleness/version_gap_min", min(low for low, _, _ in gaps))
            yield Number("staleness/version_gap_max", max(high for _, high, _ in gaps))
            yield Number("staleness/version_gap_mean", fmean(mean for _, _, mean in gaps))
        batch = list(self._batch)
        if spans := [span for group in batch for span in group.spans if span]:
            yield Number("staleness/version_span_min", min(spans))
            yield Number("staleness/version_span_max", max(spans))
            yield Number("staleness/version_span_mean", fmean(spans))
        if behind := [gap for group in batch for gap in group.behind]:
            yield Number("hoofprint_lag_in_flight", fmean(behind))
            yield Number("hoofprint_lag_in_queue", fmean(self._emitted_at - group.newest for group in batch))
            yield Number("hoofprint_lag_at_training", self._at_training)


def _as_complete(event: ev.GroupCompleted, state: ControlState) -> _Complete:
    places = [state.window.index(t.version) for t in event.trajectories]
    newest = state.window.current_index
    return _Complete(
        tuple(len(distinct_real(t.versions)) for t in event.trajectories),
        tuple(newest - place for place in places if place is not None),
        newest,
    )
