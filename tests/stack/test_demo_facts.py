"""The numbers and the checks of a demo, from hand-made events."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import events as ev
from schemas.errors import ConfigError
from schemas.settings import load
from stack.demo.checks import drift, effects, learning
from stack.demo.facts import LagRow, RunFacts, StepFacts, drift_by_lag
from stack.demo.presets import DIAL, SMOLLM2, Goal, demo_named, reward, right
from stack.demo.progress import line, sparkline

BASE: dict[str, Any] = {"run_id": "r", "occurred_at": 1_000_000}
PAYLOAD = ev.PayloadRef("u", "s", 1, "c")


def trajectory(value: float, versions: tuple[str, ...], preemptions: int = 0) -> ev.TrajectoryFacts:
    return ev.TrajectoryFacts(
        parent_traj_id="t", sample_index=0, version=versions[-1], versions=versions, reward=value, status="completed",
        reason="done", segments=1, sequences=1, output_tokens=10, context_tokens=3, preemptions=preemptions,
        abandoned_segments=0, tokens_digest="d", started_at=1, ended_at=2,
    )  # fmt: skip


def completed(group: str, *trajectories: ev.TrajectoryFacts) -> ev.Event:
    return ev.identified(
        ev.GroupCompleted(
            **BASE,
            group_id=group,
            attempt=0,
            payload=PAYLOAD,
            sequences=1,
            trainable_tokens=1,
            trajectories=trajectories,
        )
    )


def verdict(group: str, at: int, outcome: Any = "kept", reason: str = "batch") -> ev.Event:
    return ev.identified(
        ev.Verdict(
            **BASE, cause_offset=at, index=0, group_id=group, attempt=0, outcome=outcome, reason=reason
        )
    )


def published(version: str) -> ev.Event:
    return ev.identified(ev.PolicyPublished(**BASE, version=version))


def batch(step: int, *groups: str) -> ev.Event:
    members = tuple(ev.BatchGroup(group, 0, PAYLOAD, 1, 1, ()) for group in groups)
    return ev.identified(
        ev.TrainBatch(
            **BASE, cause_offset=step, index=0, batch_id=f"b{step}", step=step, groups=members, current_version="v",
            cutoff_version="v", window=(),
        )
    )  # fmt: skip


def stepped(step: int) -> ev.Event:
    return ev.identified(
        ev.StepCompleted(**BASE, step=step, batch_id=f"b{step}", digest="d", checkpoint_step=step, metrics={})
    )


LOG: list[tuple[int, ev.Event]] = [
    (0, published("v0")),
    (1, completed("a", trajectory(1.0, ("v0",)), trajectory(0.0, ("v0", "v1"), preemptions=1))),
    (2, published("v1")),
    (3, published("v2")),
    (4, completed("b", trajectory(0.5, ("v1",)))),
    (5, completed("c", trajectory(0.5, ("v2",)))),
    (0, batch(1, "a")),
    (0, verdict("a", 4)),
    (1, verdict("b", 5, "dropped", "stale")),
    (6, stepped(1)),
]


def folded(log: list[tuple[int, ev.Event]]) -> RunFacts:
    facts = RunFacts("r")
    for offset, event in log:
        facts.fold(offset, event)
    return facts


def test_the_counters() -> None:
    facts = folded(LOG)
    assert (facts.outcome("kept"), facts.outcome("dropped"), facts.stale) == (1, 1, 1)
    assert (facts.resumed, facts.output_tokens) == (1, 40)
    assert facts.rewards_of(1) == [1.0, 0.0]


def test_versions_alive_are_those_of_waiting_groups_and_the_newest() -> None:
    facts = folded(LOG)
    assert facts.versions_alive == 1  # c waits with v2, which is the newest
    assert facts.most_versions_alive == 3  # at offset 4: a (v0, v1), b (v1), and v2 is out


@given(st.randoms(use_true_random=False), st.integers(0, len(LOG) - 1))
def test_repetition_and_the_order_between_topics_do_not_matter(rng: random.Random, twice: int) -> None:
    log = [*LOG, LOG[twice]]
    control = [entry for entry in log if not isinstance(entry[1], ev.Verdict | ev.TrainBatch)]
    effects = [entry for entry in log if isinstance(entry[1], ev.Verdict | ev.TrainBatch)]
    mixed: list[tuple[int, ev.Event]] = []
    while control or effects:
        mixed.append((control if control and (not effects or rng.random() < 0.5) else effects).pop(0))
    one, other = folded(LOG), folded(mixed)
    assert one.most_versions_alive == other.most_versions_alive
    assert (one.outcomes, one.output_tokens, one.rewards) == (
        other.outcomes,
        other.output_tokens,
        other.rewards,
    )


def test_another_runs_events_do_not_count() -> None:
    facts = RunFacts("r")
    facts.fold(0, msgspec.structs.replace(LOG[1][1], run_id="other"))
    assert facts.output_tokens == 0


def series(*values: float) -> RunFacts:
    facts = RunFacts("r")
    for step, value in enumerate(values, start=1):
        facts.fold(step, completed(f"g{step}", trajectory(value, ("v0",))))
        facts.fold(step, batch(step, f"g{step}"))
        facts.fold(100 + step, stepped(step))
    return facts


@pytest.mark.parametrize(
    ("values", "goal", "ok"),
    [
        ((0.0, 0.1, 0.8, 0.9), Goal(reward, last=2, level=0.75, first=2, rise=0.5), True),
        ((0.0, 0.1, 0.7, 0.7), Goal(reward, last=2, level=0.75, first=2, rise=0.5), False),
        ((0.5, 0.6, 0.8, 0.9), Goal(reward, last=2, level=0.75, first=2, rise=0.5), False),
        ((0.0, 0.9), Goal(reward, last=2, level=0.75, first=2, rise=0.5), False),
        ((0.0, 0.0, 0.6, 0.6), Goal(right, last=2, level=0.65, first=2, rise=0.3), True),
    ],
)
def test_learning(values: tuple[float, ...], goal: Goal, ok: bool) -> None:
    assert learning(series(*values), goal).ok is ok


@pytest.mark.parametrize(
    ("rows", "noise", "rises"),
    [
        ([LagRow(0, 500, 1e-6), LagRow(1, 500, 0.02), LagRow(2, 200, 0.03)], True, True),
        ([LagRow(0, 500, 1e-6), LagRow(1, 500, 0.03), LagRow(2, 200, 0.02)], True, False),
        (
            [LagRow(0, 500, 1e-6), LagRow(1, 500, 0.02), LagRow(2, 5, 0.01)],
            True,
            True,
        ),  # 5 tokens say nothing
        ([LagRow(0, 500, 0.1), LagRow(1, 500, 0.2)], False, True),
        ([LagRow(1, 500, 0.2)], False, False),
        ([], False, False),
    ],
)
def test_drift(rows: list[LagRow], noise: bool, rises: bool) -> None:
    assert [check.ok for check in drift(rows)] == [noise, rises]


def test_drift_is_weighted_by_tokens() -> None:
    steps = [
        StepFacts(n, {}, (ev.LagDrift(1, tokens, 0.0, mean, 1.0),))
        for n, tokens, mean in [(1, 10, 0.1), (2, 30, 0.3)]
    ]
    (row,) = drift_by_lag(steps)
    assert (row.lag, row.tokens) == (1, 40)
    assert row.mean_abs == pytest.approx(0.25)


def test_a_step_in_words() -> None:
    said = line(folded(LOG), 1, 3)
    assert said.startswith("step 1/3  reward 0.500")
    assert "1 kept, 1 dropped, 0 retried (1 stale)" in said


def test_sparklines_fit_and_span_the_range() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert len(sparkline([0.5] * 1000, width=60)) == 60
    assert sparkline([]) == ""


def test_presets_are_settings_and_steps_can_be_few() -> None:

    settings = load(base=DIAL.base("d", 3))
    assert (settings.trainer.steps, settings.batch.size, settings.group.size, settings.run.run_id) == (
        3,
        8,
        8,
        "d",
    )
    assert DIAL.steps == 100
    assert SMOLLM2.settings["batch"]["size"] == 4
    assert demo_named("dial", "cpu") is DIAL


def test_on_sglang_a_demo_has_its_own_steps_and_goal() -> None:
    demo = demo_named("dial", "sglang")
    settings = load(base=demo.base("d", None))
    assert (settings.engine.server, settings.trainer.steps, demo.goal.level) == ("sglang", 30, 0.2)
    assert (settings.trainer.learning_rate, settings.group.size) == (4e-3, 8)  # the rest is the demo's
    assert load(base=DIAL.base("d", None)).engine.server == "cpu"


@pytest.mark.parametrize(
    ("task", "engine", "words"), [("chess", "cpu", "dial, smollm2"), ("dial", "tpu", "cpu, sglang")]
)
def test_an_unknown_demo_or_engine_names_those_that_there_are(task: str, engine: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        demo_named(task, engine)


@pytest.mark.parametrize(
    ("preempted", "cuts", "ok"), [(3, True, True), (0, True, False), (0, False, True), (3, False, False)]
)
def test_updates_cut_generations_unless_the_engines_hold_them(preempted: int, cuts: bool, ok: bool) -> None:
    facts = RunFacts("r", preempted=preempted, resumed=2)
    found = {check.name: check.ok for check in effects(DIAL, facts, full=True, cuts=cuts)}
    assert (found["preempted"], found["resumed"]) == (ok, True)
