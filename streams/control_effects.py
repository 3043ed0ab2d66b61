"""What one record of `control.v1` causes, as effects: each with its cause, its place among the record's effects, and the time
of the cause, so that folding again gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schemas import events as ev
from schemas.events import Effect
from schemas.window import WindowFacts
from streams.control_batches import Judged
from streams.control_state import ControlState, OpenRequest


class RecordEffects:
    """The effects of the record at `offset`, in order. `quiet`: they stand in their topics already and are only counted."""

    __slots__ = ("effects", "occurred_at", "offset", "quiet", "state")

    def __init__(self, state: ControlState, offset: int, occurred_at: int, quiet: bool) -> None:
        self.state, self.quiet = state, quiet
        self.offset, self.occurred_at = offset, occurred_at
        self.effects: list[Effect] = []

    def verdict(
        self,
        group: str,
        attempt: int,
        outcome: ev.Outcome,
        reason: str,
        facts: WindowFacts,
        *,
        next_attempt: int | None = None,
        batch_id: str | None = None,
    ) -> None:
        """What becomes of an attempt, and how the window saw it."""
        self.state.count(f"{outcome}:{reason}")
        if self.quiet:
            return
        self.emit(
            ev.Verdict,
            group_id=group,
            attempt=attempt,
            outcome=outcome,
            reason=reason,
            next_attempt=next_attempt,
            batch_id=batch_id,
            current_index=facts.current_index,
            cutoff_index=facts.cutoff_index,
            gap_min=min(facts.gaps, default=0),
            gap_max=max(facts.gaps, default=0),
            gap_mean=facts.gap_mean,
        )

    def batch(self, request: OpenRequest, chosen: Sequence[Judged], *, short: bool) -> None:
        """The answer to a request, with the window as it stands."""
        if self.quiet:
            return
        window = self.state.window
        live = tuple(window.labels[window.cutoff_index :]) if window.keep_versions else ()
        self.emit(
            ev.TrainBatch,
            batch_id=request.batch_id,
            step=request.step,
            branch=self.state.branch,
            groups=tuple(entry.group for entry, _ in chosen),
            current_version=window.labels[-1] if window.labels else "",
            cutoff_version=live[0] if live else "",
            window=live,
            short=short,
        )

    def emit(self, effect: type[Effect], **fields: Any) -> None:
        """The next effect of the record."""
        if self.quiet:
            return
        state = self.state
        self.effects.append(
            ev.identified(
                effect(
                    run_id=state.run_id,
                    policy_id=state.policy_id,
                    occurred_at=self.occurred_at,
                    cause_offset=self.offset,
                    index=len(self.effects),
                    **fields,
                )
            )
        )
