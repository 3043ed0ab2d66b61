"""Ids and times of a replayed event: every id that hashes the run's id is computed again for the new run.

Pure. What is no hash of the run (epochs, labels, free session ids, foreign group names) stays. Times move by a shift that the
caller chooses per attempt: live workers compare them with their clocks, and an old attempt would be timed out at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from schemas import events as ev
from schemas import ids

E = TypeVar("E", bound=ev.Event)
TIMES = ("occurred_at", "received_at", "first_token_at", "done_at")
CopyPayload = Callable[[ev.PayloadRef, str, int], ev.PayloadRef]


class ReplayIds:
    """From the old run's ids to the new run's. `session_events`: all that will be replayed, for the names of lineages."""

    def __init__(
        self, old_run: str, new_run: str, session_events: Iterable[ev.Event], copy_payload: CopyPayload
    ) -> None:
        self._old = old_run
        self._new = new_run
        self._copy = copy_payload
        self._trajectories: dict[str, str] = {}
        self._lineage_starts: dict[tuple[str, str], int] = {}
        for event in session_events:
            if isinstance(event, ev.SessionEvent):
                self._trajectories[event.parent_traj_id] = self._trajectory(event)
            if isinstance(event, ev.TokenSegment):
                key = (event.parent_traj_id, event.lineage_id)
                self._lineage_starts[key] = min(
                    event.segment_index, self._lineage_starts.get(key, event.segment_index)
                )

    def group(self, group_id: str) -> str:
        """Our group names begin with the run's id; a foreign one stays."""
        return (
            f"{self._new}-{group_id.removeprefix(f'{self._old}-')}"
            if group_id.startswith(f"{self._old}-")
            else group_id
        )

    def rewrite(self, event: E, shift_us: int = 0) -> E:
        """The same fact of the new run, `shift_us` later."""
        changes: dict[str, Any] = {
            name: getattr(event, name) + shift_us for name in TIMES if getattr(event, name, None) is not None
        }
        changes["run_id"] = self._new
        if getattr(event, "group_id", None) is not None:
            changes["group_id"] = self.group(event.group_id)  # type: ignore[attr-defined]
        if isinstance(event, ev.SessionEvent):
            changes |= self._session(event)
        if isinstance(event, ev.TokenSegment):
            changes |= self._segment(event)
        if isinstance(event, ev.RewardAssigned):
            parent = self._trajectories.get(event.parent_traj_id, event.parent_traj_id)
            session = parent if event.session_id == event.parent_traj_id else event.session_id
            changes |= {"parent_traj_id": parent, "session_id": session}
        if isinstance(event, ev.BatchRequested | ev.StepCompleted):
            changes["batch_id"] = self._batch(event)
        if isinstance(event, ev.GroupFailed):
            changes["trajectories"] = tuple(
                msgspec.structs.replace(
                    one, parent_traj_id=self._trajectories.get(one.parent_traj_id, one.parent_traj_id)
                )
                for one in event.trajectories
            )
        return ev.identified(msgspec.structs.replace(event, **changes))

    def _trajectory(self, event: ev.SessionEvent) -> str:
        if event.group_id is None or event.attempt is None or event.sample_index is None:
            return ids.free_traj_id(self._new, event.session_id)
        return ids.parent_traj_id(self._new, self.group(event.group_id), event.attempt, event.sample_index)

    def _session(self, event: ev.SessionEvent) -> dict[str, Any]:
        parent = self._trajectories[event.parent_traj_id]
        session = parent if event.session_id == event.parent_traj_id else event.session_id
        return {"parent_traj_id": parent, "session_id": session}

    def _segment(self, event: ev.TokenSegment) -> dict[str, Any]:
        start = self._lineage_starts[event.parent_traj_id, event.lineage_id]
        group = self.group(event.group_id) if event.group_id is not None else event.session_id
        refs = {name: getattr(event, name) for name in ("tokens_ref", "request_ref", "experts")}
        return {
            "lineage_id": ids.lineage_id(self._trajectories[event.parent_traj_id], start),
            **{
                name: self._copy(ref, group, event.attempt or 0)
                for name, ref in refs.items()
                if ref is not None
            },
        }

    def _batch(self, event: ev.BatchRequested | ev.StepCompleted) -> str:
        """A step trained again after a rollback names the batch of the branch that requested it."""
        for branch in (event.branch, ""):
            if event.batch_id == ids.batch_id(self._old, event.step, branch):
                return ids.batch_id(self._new, event.step, branch)
        return ids.stable_id("batch", self._new, event.batch_id)
