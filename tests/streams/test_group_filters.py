"""Filters of complete groups: what is dropped and why, and what a user's filter may not do."""

from __future__ import annotations

from typing import Any

import pytest
from control_log import RUN, admitted, completed, configured, run_fold, summary

from schemas import events as ev
from schemas.errors import ConfigError
from schemas.settings import load
from streams.control_fold import fold
from streams.control_state import ControlState
from streams.controller_app import main


def raises(_event: ev.GroupCompleted) -> bool:
    raise KeyError("reward")


def is_vague(event: ev.GroupCompleted) -> Any:
    return event.sequences


def fate(event: ev.GroupCompleted, **sets: object) -> str | None:
    effects = run_fold(configured(batch__size=9, **sets), admitted("a"), event)
    return str(summary(effects)[0][3]) if effects else None


@pytest.mark.parametrize(
    ("minimum", "failures", "reason"),
    [(0, 2, None), (1, 2, None), (2, 1, None), (2, 2, "too_few_live"), (3, 1, "too_few_live")],
)
def test_a_group_needs_as_many_live_trajectories_as_the_setting_says(
    minimum: int, failures: int, reason: str | None
) -> None:
    event = completed("a", ["v1", "v1", "v1"], failures=failures)
    assert fate(event, group__min_live_trajectories=minimum) == reason


def test_a_trajectory_without_a_sequence_is_not_live() -> None:
    import msgspec

    event = completed("a", ["v1", "v1"])
    silent = msgspec.structs.replace(event.trajectories[0], sequences=0)
    event = msgspec.structs.replace(event, trajectories=(silent, event.trajectories[1]))
    assert fate(event, group__min_live_trajectories=2) == "too_few_live"


@pytest.mark.parametrize(("tokens", "reason"), [(3, None), (4, "filtered")])
def test_a_filter_of_the_users_own_decides_by_the_event(tokens: int, reason: str | None) -> None:
    event = completed("a", ["v1", "v1"], tokens=tokens)
    assert fate(event, group__filter="control_log:keeps_odd_lengths") == reason


def test_staleness_comes_before_the_filters() -> None:
    from control_log import published

    effects = run_fold(
        configured(window__keep_versions=1, group__filter="control_log:keeps_odd_lengths"),
        published("v1"),
        published("v2"),
        admitted("a"),
        completed("a", ["v1"], tokens=4),
    )
    assert summary(effects) == [("dropped", "a", 0, "stale")]


@pytest.mark.parametrize(
    ("name", "words"), [("raises", "failed on a: KeyError"), ("is_vague", "gives 2, not True or False")]
)
def test_a_filter_that_does_not_work_ends_the_fold_and_names_itself(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"test_group_filters:{name} {words}"):
        fate(completed("a", ["v1", "v1"]), group__filter=f"test_group_filters:{name}")


@pytest.mark.parametrize("name", ["no_such_module:keep", "control_log:no_such_function", "control_log:RUN"])
def test_a_filter_that_is_not_there_is_found_at_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        main(load(sets=(f"group.filter={name}",)))
    with pytest.raises(ConfigError, match=name):
        fold(ControlState(RUN), 0, configured(group__filter=name))


def test_a_filter_is_written_as_module_and_function() -> None:
    with pytest.raises(ConfigError, match=r"group\.filter"):
        load(sets=("group.filter=print",))


def test_a_configuration_from_before_these_settings_folds_as_it_did() -> None:
    import json

    import msgspec

    new = configured(batch__size=1)
    tree = json.loads(new.settings)
    del tree["retry"], tree["group"]["filter"], tree["group"]["min_live_trajectories"]
    old = msgspec.structs.replace(new, settings=json.dumps(tree))
    state = ControlState(RUN)
    run_fold(old, admitted("a"), completed("a", ["v1"], failures=1), state=state)
    assert set(state.pending) == {"a"}
