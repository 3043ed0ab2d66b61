"""Dressage's `staleness/...` numbers, from the events and effects of `control.v1` as the controller meets them.

Gaps and spans are those of the newest batch's trajectories, of the first batch on after a start: the fold needs none of
this, so that it is kept beside it. The counts come from the fold's state and are of the whole log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from schemas import events as ev
from schemas.events import Effect, Event
from schemas.metric_names import MetricName
from schemas.versions import distinct_real
from streams.control_state import ControlState
from streams.metrics_http import Number


class StalenessNumbers:
    """Told about every record, in log order."""

    def __init__(self) -> None:
        self._spans_of: dict[str, list[int]] = {}
        self._spans: list[int] = []
        self._gaps: list[tuple[int, int, float]] = []

    def told(self, event: Event, effects: Sequence[Effect], state: ControlState) -> None:
        """One record, what it caused, and the state behind it."""
        if isinstance(event, ev.GroupCompleted):
            self._spans_of[event.group_id] = [len(distinct_real(t.versions)) for t in event.trajectories]
        for effect in effects:
            self._caused(effect)
        if isinstance(event, ev.GroupCompleted) and event.group_id not in state.pending:
            self._spans_of.pop(event.group_id, None)  # a late end has no verdict that would take it away

    def _caused(self, effect: Effect) -> None:
        if isinstance(effect, ev.TrainBatch):
            self._gaps = []
            self._spans = [span for g in effect.groups for span in self._spans_of.get(g.group_id, ()) if span]
        elif isinstance(effect, ev.Verdict):
            if effect.outcome == "kept":
                self._gaps.append((effect.gap_min, effect.gap_max, effect.gap_mean))
            self._spans_of.pop(effect.group_id, None)

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
            yield Number("staleness/version_gap_mean", sum(mean for _, _, mean in gaps) / len(gaps))
        if spans := list(self._spans):
            yield Number("staleness/version_span_min", min(spans))
            yield Number("staleness/version_span_max", max(spans))
            yield Number("staleness/version_span_mean", sum(spans) / len(spans))
