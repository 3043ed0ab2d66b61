"""Which complete groups are worth training on: the group's facts in, the reason to drop it out. Pure.

A filter of the user's own is a `module:function` of `GroupCompleted` that returns True to keep it. It is recorded by name in
`RunConfigured` and must decide by the event alone: the fold calls it again at every restart, replay and what-if, and the same
log must give the same verdicts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache

from schemas.completed_brief import CompletedBrief
from schemas.errors import ConfigError
from schemas.events import GroupCompleted, TrajectoryFacts
from streams.control_state import GroupChoice

GroupFilter = Callable[[GroupCompleted], bool]


def needs_facts(choice: GroupChoice) -> bool:
    """Whether `refusal` looks at what a group's trajectories are."""
    return bool(choice.min_live_trajectories or choice.drop_zero_variance or choice.filter)


def refusal(event: GroupCompleted | CompletedBrief, choice: GroupChoice) -> str | None:
    """Why a group is not trained on; None: it may be. ConfigError: the user's filter does not work.

    A brief event will do where nobody `needs_facts`.
    """
    if event.sequences == 0:
        return "no_sequences"
    if isinstance(event, CompletedBrief):
        return None
    if choice.min_live_trajectories and _live(event.trajectories) < choice.min_live_trajectories:
        return "too_few_live"
    if choice.drop_zero_variance and _zero_variance(event.trajectories):
        return "zero_variance"
    if choice.filter and not _passes(event, choice.filter):
        return "filtered"
    return None


@cache
def load_filter(name: str) -> GroupFilter:
    """The function `module:function`. ConfigError: there is none."""
    module_name, _, function_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as missing:
        raise ConfigError(f"there is no group filter {name}: {missing}", filter=name) from missing
    if not callable(found):
        raise ConfigError(f"the group filter {name} is no function", filter=name)
    function: GroupFilter = found
    return function


def _passes(event: GroupCompleted, name: str) -> bool:
    function = load_filter(name)
    try:
        kept = function(event)
    except Exception as failure:  # boundary: somebody else's code, whatever it raises
        raise ConfigError(
            f"the group filter {name} failed on {event.group_id}: {failure!r}",
            filter=name,
            group_id=event.group_id,
        ) from failure
    if not isinstance(kept, bool):
        raise ConfigError(f"the group filter {name} gives {kept!r}, not True or False", filter=name)
    return kept


def _live(trajectories: Sequence[TrajectoryFacts]) -> int:
    """Trajectories that have something to train on."""
    return sum(t.status != "failed" and t.sequences > 0 for t in trajectories)


def _zero_variance(trajectories: Sequence[TrajectoryFacts]) -> bool:
    """Whether all rewards that would enter the group's statistics are equal: its advantages are exactly 0."""
    rewards = {t.reward for t in trajectories if t.status != "failed" and t.reward is not None}
    return len(rewards) <= 1
