"""What each stream process shows at its metrics endpoint, from its own state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from journal.metrics_http import Number
from streams.admission import AdmissionState
from streams.control_state import ControlState
from streams.feeder_watches import Watches
from streams.staleness_numbers import StalenessNumbers

_EVENTS = ("applied", "duplicate", "void", "after_end", "closed_attempt", "other_run", "other_kind")
_OUTCOMES = ("kept", "dropped", "retry")
_NOT_IGNORED = ("admitted", "dead_letters", "rejected_groups", "rejected_samples")


def assembler_numbers(counts: Mapping[str, int], open_groups: int) -> Iterator[Number]:
    """`counts` as the worker keeps them."""
    for outcome in _EVENTS:
        yield Number("hoofprint_events_total", counts.get(outcome, 0), {"outcome": outcome})
    yield Number("hoofprint_duplicates_total", counts.get("duplicate", 0))
    yield Number("hoofprint_void_events_total", counts.get("void", 0))
    yield Number("hoofprint_closed_attempt_events_total", counts.get("closed_attempt", 0))
    yield Number("hoofprint_dead_letters_total", counts.get("dead_letters", 0))
    yield Number("hoofprint_groups_completed_total", counts.get("groups_completed", 0))
    yield Number("hoofprint_groups_failed_total", counts.get("groups_failed", 0))
    yield Number("hoofprint_open_groups", open_groups)


def controller_numbers(state: ControlState, staleness: StalenessNumbers) -> Iterator[Number]:
    """Counters are of the whole log, so that they go on where they stood when the process starts again."""
    for name, count in list(state.counters.items()):
        outcome, _, reason = name.partition(":")
        if outcome in _OUTCOMES:
            yield Number("hoofprint_verdicts_total", count, {"outcome": outcome, "reason": reason})
        elif name not in _NOT_IGNORED:
            yield Number("hoofprint_ignored_control_events_total", count, {"why": name})
    yield Number("hoofprint_admitted_groups_total", state.counters.get("admitted", 0))
    yield Number("hoofprint_dead_letters_total", state.counters.get("dead_letters", 0))
    yield Number("hoofprint_batches_total", state.steps)
    yield Number("hoofprint_late_sightings_total", state.window.late_sightings)
    yield Number("hoofprint_outstanding_groups", state.open_groups)
    yield Number("hoofprint_pending_groups", len(state.pending))
    yield Number("hoofprint_spent_tokens_total", state.costs.spent)
    yield Number("hoofprint_retried_tokens_total", state.costs.retried)
    yield from staleness.numbers(state)


def feeder_numbers(state: AdmissionState, watches: Watches) -> Iterator[Number]:
    """Admission and the watchdog."""
    yield Number("hoofprint_admitted_groups_total", state.admitted_groups)
    yield Number("hoofprint_outstanding_groups", len(state.open_groups))
    yield Number("hoofprint_waiting_retries", len(state.retries))
    yield Number("hoofprint_no_progress_seconds", watches.idle_s())
    yield Number("hoofprint_alarms_total", watches.alarms)
