"""What happened in a run, as a fold over its log: the live display and the checks read the same numbers.

Idempotent by event id; the order between topics does not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from schemas import events as ev
from schemas.versions import distinct_real


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One optimizer step."""

    step: int
    metrics: dict[str, float]
    drift: tuple[ev.LagDrift, ...]


@dataclass(slots=True)
class Life:
    """An attempt between its completion and its verdict, in offsets of `control.v1`. `judged_at` None: not yet."""

    versions: frozenset[str]
    completed_at: int
    judged_at: int | None = None


@dataclass(slots=True)
class RunFacts:
    """Counters and series of one run."""

    run_id: str
    steps: dict[int, StepFacts] = field(default_factory=dict)
    batches: dict[int, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    rewards: dict[tuple[str, int], tuple[float, ...]] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    published: list[tuple[int, str]] = field(default_factory=list)
    preempted: int = 0
    resumed: int = 0
    output_tokens: int = 0
    admitted: int = 0
    started_at: int = 0
    now: int = 0
    _lives: dict[tuple[str, int], Life] = field(default_factory=dict)
    _judged: dict[tuple[str, int], int] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)

    def fold(self, offset: int, event: ev.Event) -> None:
        """Take one event of `control.v1`, `rollout.verdicts.v1` or `train.batches.v1`; `offset` in its own topic."""
        if event.run_id != self.run_id or event.event_id in self._seen:
            return
        self._seen.add(event.event_id)
        self.now = max(self.now, event.occurred_at)
        match event:
            case ev.GroupCompleted():
                self._completed(offset, event)
            case ev.Verdict():
                self._verdict(event)
            case ev.StepCompleted():
                self.steps[event.step] = StepFacts(event.step, event.metrics, event.drift)
            case ev.TrainBatch():
                self.batches[event.step] = tuple((group.group_id, group.attempt) for group in event.groups)
            case ev.PolicyPublished():
                self.published.append((offset, event.version))
            case ev.PolicyActivated():
                self.preempted += event.preempted
            case ev.GroupAdmitted():
                self.admitted += 1
                self.started_at = self.started_at or event.occurred_at
            case _:
                return

    def _completed(self, offset: int, event: ev.GroupCompleted) -> None:
        attempt = (event.group_id, event.attempt)
        if attempt in self._lives:
            return
        versions = distinct_real(label for t in event.trajectories for label in t.versions)
        self._lives[attempt] = Life(frozenset(versions), offset, self._judged.get(attempt))
        self.rewards[attempt] = tuple(t.reward for t in event.trajectories if t.reward is not None)
        self.output_tokens += sum(t.output_tokens for t in event.trajectories)
        self.resumed += sum(t.preemptions for t in event.trajectories)

    def _verdict(self, event: ev.Verdict) -> None:
        self.outcomes[f"{event.outcome}({event.reason})" if event.outcome != "kept" else "kept"] += 1
        attempt = (event.group_id, event.attempt)
        self._judged[attempt] = event.cause_offset
        if attempt in self._lives:
            self._lives[attempt].judged_at = event.cause_offset

    def rewards_of(self, step: int) -> list[float]:
        """Rewards of the trajectories that the step was trained on."""
        return [value for attempt in self.batches.get(step, ()) for value in self.rewards.get(attempt, ())]

    def outcome(self, kind: str) -> int:
        """Verdicts of an outcome, whatever the reason."""
        return sum(count for name, count in self.outcomes.items() if name.split("(")[0] == kind)

    @property
    def stale(self) -> int:
        """Groups that the window refused, dropped or requeued."""
        return sum(count for name, count in self.outcomes.items() if "stale" in name)

    @property
    def versions_alive(self) -> int:
        """Distinct versions among the newest one and the groups that wait for their verdict now."""
        waiting = [life.versions for life in self._lives.values() if life.judged_at is None]
        return len(frozenset[str]().union(*waiting, self._newest_before(None)))

    @property
    def most_versions_alive(self) -> int:
        """The largest number of versions alive at one offset of `control.v1`."""
        most = 0
        for offset in {life.completed_at for life in self._lives.values()}:
            waiting = [
                life.versions
                for life in self._lives.values()
                if life.completed_at <= offset and (life.judged_at is None or life.judged_at >= offset)
            ]
            most = max(most, len(frozenset[str]().union(*waiting, self._newest_before(offset))))
        return most

    def _newest_before(self, offset: int | None) -> frozenset[str]:
        labels = [label for at, label in self.published if offset is None or at <= offset]
        return frozenset(labels[-1:])

    @property
    def seconds(self) -> float:
        """From the first admission to the newest event."""
        return (self.now - self.started_at) / 1e6 if self.started_at else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of completed groups."""
        return self.output_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class LagRow:
    """Drift of all tokens of one lag over the run, weighted by tokens."""

    lag: int
    tokens: int
    mean_abs: float


def drift_by_lag(steps: Iterable[StepFacts]) -> list[LagRow]:
    """Rows in the order of the lag."""
    tokens: Counter[int] = Counter()
    sums: dict[int, float] = {}
    for step in steps:
        for row in step.drift:
            tokens[row.lag] += row.tokens
            sums[row.lag] = sums.get(row.lag, 0.0) + row.mean_abs * row.tokens
    return [LagRow(lag, tokens[lag], sums[lag] / tokens[lag]) for lag in sorted(tokens) if tokens[lag]]
