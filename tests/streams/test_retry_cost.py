"""`retry.policy = budget`: retries stay within their share of all tokens, by what the log says."""

from __future__ import annotations

from admission_world import World
from control_log import RUN, admitted, completed, configured, failed, logs, published, run_fold, summary
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import events as ev
from schemas.events import Event
from streams.control_fold import fold
from streams.control_state import ControlState
from streams.retry_cost import RetryCosts, length_class


def budget(share: float, **sets: object) -> ev.RunConfigured:
    return configured(
        retry__policy="budget", retry__share=share, batch__size=16, window__keep_versions=0, **sets
    )


def spends(group: str, tokens: int, prompt: int = 0, context: int = 2) -> list[Event]:
    """A group of one trajectory completes after so many tokens."""
    return [
        admitted(group, prompt=prompt),
        completed(group, ["v1"], rewards=[1.0], tokens=tokens, context=context),
    ]


def test_a_retry_within_its_share_is_given_and_one_beyond_it_is_dropped() -> None:
    """90 tokens so far, a retry is expected to cost 10: one in ten, but not two."""
    log = [*spends("a", 10), *[event for i in range(8) for event in spends(f"b{i}", 10)]]
    log += [admitted("x"), failed("x"), admitted("y"), failed("y")]
    assert summary(run_fold(budget(0.1), *log)) == [
        ("retry", "x", 0, "timeout"),
        ("dropped", "y", 0, "retry_cost"),
    ]
    assert summary(run_fold(budget(0.2), *log)) == [
        ("retry", "x", 0, "timeout"),
        ("retry", "y", 0, "timeout"),
    ]


def test_always_counts_nothing() -> None:
    state = ControlState(RUN)
    log = [*spends("a", 10), admitted("x"), failed("x")]
    assert summary(run_fold(configured(batch__size=16), *log, state=state)) == [("retry", "x", 0, "timeout")]
    assert state.costs == RetryCosts()


def test_exhausted_retries_come_before_their_cost() -> None:
    log = [admitted("x"), failed("x", versions=["v1"])]
    assert summary(run_fold(budget(0.1, group__max_retries=0), *log)) == [
        ("dropped", "x", 0, "retry_exhausted")
    ]


def test_a_requeued_stale_group_is_subject_to_the_budget() -> None:
    sets = {"group__on_stale": "requeue", "retry__policy": "budget", "retry__share": 0.4, "batch__size": 16}
    log = [published("v1"), *spends("a", 10), published("v2")]
    assert summary(run_fold(configured(window__keep_versions=1, **sets), *log)) == [
        ("dropped", "a", 0, "retry_cost")
    ]
    cheap = [published("v1"), *spends("a", 10), *spends("b", 30, prompt=1), published("v2")]
    assert summary(run_fold(configured(window__keep_versions=1, **sets), *cheap)) == [
        ("retry", "a", 0, "stale"),
        ("dropped", "b", 0, "retry_cost"),
    ]


def facts(tokens: int, context: int) -> tuple[ev.TrajectoryFacts, ...]:
    return completed("x", ["v1"], tokens=tokens, context=context).trajectories


def test_the_mean_is_that_of_the_prompt_then_of_its_length_then_of_all() -> None:
    costs = RetryCosts()
    for group, prompt in (("a", 1), ("b", 1), ("c", 2), ("x", 1), ("y", 7)):
        costs.admitted(group, prompt)
    assert costs.expected("x", ()) == 0
    for group, tokens, context in (("a", 10, 3), ("b", 20, 3), ("c", 90, 100)):
        costs.ended(group, 0, facts(tokens, context), complete=True)
    assert costs.expected("x", facts(1, 100)) == 15
    assert costs.expected("y", facts(1, 2)) == 15
    assert costs.expected("y", facts(1, 127)) == 90
    assert costs.expected("y", facts(1, 5000)) == 40
    assert costs.expected("y", facts(700, 2)) == 700
    assert [length_class(facts(1, n)) for n in (0, 1, 2, 3, 4, 127, 128)] == [0, 1, 2, 2, 3, 7, 8]


def test_failed_attempts_are_spent_and_say_nothing_about_what_an_attempt_costs() -> None:
    costs = RetryCosts()
    costs.admitted("a", 0)
    costs.ended("a", 1, facts(50, 2), complete=False)
    assert (costs.spent, costs.retried, costs.overall.value) == (50, 50, 0)


def test_a_promise_is_kept_until_the_retry_ends_or_the_group_does() -> None:
    costs = RetryCosts(spent=100)
    assert costs.take("a", 10, 0.2)
    assert costs.take("b", 10, 0.2)
    assert not costs.take("c", 10, 0.2)
    costs.ended("a", 1, facts(4, 2), complete=True)
    assert (costs.promised_tokens, costs.retried, costs.spent) == (10, 4, 104)
    costs.left("b")
    assert costs.promised_tokens == 0


@settings(max_examples=150, deadline=None)
@given(logs())
def test_the_sums_are_those_of_the_log(log: list[Event]) -> None:
    state = ControlState(RUN)
    run_fold(*log, state=state)
    costs = state.costs
    assert costs.promised_tokens == sum(costs.promised.values())
    open_groups = set(state.running) | set(state.retrying) | set(state.pending)
    assert set(costs.promised) <= set(state.running) | set(state.retrying)
    assert set(costs.prompts) == (
        open_groups if state.settings and state.settings.retry.policy == "budget" else set()
    )
    assert costs.retried <= costs.spent


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.1, 0.3]))
def test_retries_never_take_more_than_their_share_when_they_cost_what_was_expected(
    seed: int, share: float
) -> None:
    world = World(seed, 40, retry__policy="budget", retry__share=share, batch__size=2, group__max_retries=3)
    world.fails = lambda prompt, attempt: (prompt + attempt) % 3 == 0
    world.run()
    state = ControlState(RUN)
    for offset, event in enumerate(world.log):
        effects = fold(state, offset, event)
        if any(isinstance(effect, ev.Verdict) and effect.outcome == "retry" for effect in effects):
            costs = state.costs
            assert costs.retried + costs.promised_tokens <= share * (costs.spent + costs.promised_tokens)
    assert {v.reason for v in world.verdicts() if v.outcome == "dropped"} & {"retry_cost"}
    assert len({v.group_id for v in world.verdicts() if v.outcome != "retry"}) == 40
