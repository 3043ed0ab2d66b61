"""What becomes of each attempt, as far as its payload files go: a fold over the controller's effects and the trainer's steps.

Told every archived event, in any order between topics and any number of times. Admitted: open, until a verdict ends the
attempt (`retry` does, too) or its group, or a batch takes it. A batch wins over everything, whatever is read first: an
attempt that was kept stays open until its batch is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from analytics.retention import Fate, place_of
from journal.payloads import StoredPayload, place
from schemas import events as ev

READ = (ev.GroupAdmitted, ev.Verdict, ev.TrainBatch, ev.StepCompleted, ev.RolledBack)
"""All that a restart has to read again."""


@dataclass(slots=True)
class _Group:
    ended: bool = False
    attempts: dict[str, Fate] = field(default_factory=dict)  # by place


class PayloadFates:
    """`keep_checkpoints`: how many the trainer keeps on disk."""

    def __init__(self, run_id: str, keep_checkpoints: int) -> None:
        self._run_id, self._keep = run_id, keep_checkpoints
        self._groups: dict[str, _Group] = {}
        self._branch = ""
        self._branches: set[str] = set()
        self._checkpoints: list[int] = []

    def told(self, event: ev.Event) -> None:
        """One event of the log; those of other runs and kinds say nothing about our attempts."""
        handler = _HANDLERS.get(type(event))
        if handler is not None and event.run_id == self._run_id and event.kind == "train":
            handler(self, event)

    def fate(self, payload: StoredPayload) -> Fate | None:
        """Of the attempt that a file belongs to; None: no group of training that we know."""
        at = place_of(payload.uri)
        group = self._groups.get(_group_of(at))
        return group.attempts.get(at) if group is not None else None

    @property
    def covered_step(self) -> int | None:
        """The newest step that each of the kept checkpoints holds; None: the initial weights may still be gone back to."""
        return self._checkpoints[-self._keep] if len(self._checkpoints) >= self._keep else None

    def forget_all_but(self, stored: Iterable[StoredPayload]) -> None:
        """Groups that have ended and have no file any more: memory follows the files that are there."""
        there = {_group_of(place_of(payload.uri)) for payload in stored}
        for name in [name for name, group in self._groups.items() if group.ended and name not in there]:
            del self._groups[name]

    def _group(self, group_id: str) -> _Group:
        return self._groups.setdefault(_group_of(place(group_id, 0)), _Group())

    def _admitted(self, event: ev.GroupAdmitted) -> None:
        group = self._group(event.group_id)
        group.attempts.setdefault(place(event.group_id, event.attempt), "over" if group.ended else "open")

    def _judged(self, event: ev.Verdict) -> None:
        group, at = self._group(event.group_id), place(event.group_id, event.attempt)
        if event.outcome == "kept":
            group.attempts.setdefault(at, "open")
        elif not isinstance(group.attempts.get(at), int):
            group.attempts[at] = "over"
        if event.outcome != "retry":
            group.ended = True
            for other, fate in group.attempts.items():
                if fate == "open" and (other != at or event.outcome != "kept"):
                    group.attempts[other] = "over"

    def _batched(self, event: ev.TrainBatch) -> None:
        for one in event.groups:
            self._group(one.group_id).attempts[place(one.group_id, one.attempt)] = event.step

    def _trained(self, event: ev.StepCompleted) -> None:
        known = self._checkpoints
        if event.branch == self._branch and event.checkpoint_step > (known[-1] if known else 0):
            known.append(event.checkpoint_step)
            del known[: -self._keep]

    def _rolled_back(self, event: ev.RolledBack) -> None:
        if event.branch not in self._branches:
            self._branches.add(event.branch)
            self._branch = event.branch
            self._checkpoints = [step for step in self._checkpoints if step <= event.to_step]


def _group_of(at: str) -> str:
    return at.partition("/")[0]


_HANDLERS: dict[type[ev.Event], Callable[[PayloadFates, Any], None]] = {
    ev.GroupAdmitted: PayloadFates._admitted,  # noqa: SLF001 — its own
    ev.Verdict: PayloadFates._judged,  # noqa: SLF001
    ev.TrainBatch: PayloadFates._batched,  # noqa: SLF001
    ev.StepCompleted: PayloadFates._trained,  # noqa: SLF001
    ev.RolledBack: PayloadFates._rolled_back,  # noqa: SLF001
}
