"""What a demo must show, from the run's facts alone.

Nothing is arranged: a check that fails is named, and the demo exits non-zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from stack.demo.facts import LagRow, RunFacts, drift_by_lag
from stack.demo.presets import Demo, Goal

NOISE = 1e-3
"""Mean |drift| in nats that two implementations of one float32 model may have at lag 0."""
ENOUGH = 0.02
"""Share of the tokens that a lag needs before its mean says anything."""


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement, whether it held, and the numbers."""

    name: str
    ok: bool
    said: str


def effects(demo: Demo, facts: RunFacts, *, full: bool, cuts: bool = True) -> list[Check]:
    """The real effects of asynchrony. `full`: the run was long enough for learning and staleness to be required of it;
    `cuts`: weight updates cut generations (`proxy.update_strategy = abort`)."""
    found = [Check("steps", bool(facts.steps), f"{len(facts.steps)} optimizer steps")]
    if full:
        found.append(learning(facts, demo.goal))
    if full and demo.shows_staleness:
        found += [
            Check(
                "versions_alive",
                facts.most_versions_alive >= 3,
                f"at most {facts.most_versions_alive} at one moment",
            ),
            Check(
                "preempted",
                (facts.preempted > 0) == cuts,
                f"{facts.preempted} generations were cut by a weight update",
            ),
            Check("resumed", facts.resumed > 0, f"{facts.resumed} went on under the new weights"),
            Check("stale_groups", facts.stale > 0, f"{facts.stale} groups fell out of the window"),
            *drift(drift_by_lag(facts.steps.values())),
        ]
    return found


def learning(facts: RunFacts, goal: Goal) -> Check:
    """The end is good, and better than the beginning by the goal's rise."""
    values = [
        fmean(map(goal.measure, rewards))
        for step in sorted(facts.steps)
        if (rewards := facts.rewards_of(step))
    ]
    if len(values) < goal.first + goal.last:
        return Check("learning", False, f"only {len(values)} steps")
    last, first = fmean(values[-goal.last :]), fmean(values[: goal.first])
    said = f"{goal.measure.__name__} {first:.3f} in the first {goal.first} steps, {last:.3f} in the last {goal.last}"
    return Check("learning", last >= goal.level and last - first >= goal.rise, said)


def drift(rows: Sequence[LagRow]) -> list[Check]:
    """Log-probs of rollout and trainer agree where the weights are the same, and part the more the older the weights."""
    total = sum(row.tokens for row in rows)
    telling = [row for row in rows if row.tokens >= ENOUGH * total]
    said = ", ".join(f"lag {row.lag}: {row.mean_abs:.2g} ({row.tokens} tokens)" for row in rows)
    fresh = next((row for row in rows if row.lag == 0), None)
    rising = len(telling) >= 2 and all(a.mean_abs < b.mean_abs for a, b in pairwise(telling))
    return [
        Check("drift_at_lag_0", fresh is not None and fresh.mean_abs < NOISE, said or "no tokens"),
        Check("drift_rises_with_lag", rising, said or "no tokens"),
    ]
