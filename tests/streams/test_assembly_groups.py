"""When a group is complete, when it fails, and what is left out: one law each, on the pure reducer."""

from __future__ import annotations

import msgspec
import pytest
from assembler_runs import SECOND, completed, failed, feed, flat, fresh, rejected
from assembler_sessions import Session, end_facts, group

from schemas import events as ev
from schemas.versions import VersionSpan
from streams.assembly import drop_closed, low_water, tick
from streams.assembly_closed import Attempt, ClosedAttempts


def test_a_group_is_complete_with_the_last_event_of_its_last_sample() -> None:
    state = fresh(3)
    events = flat(group(size=3))
    assert feed(state, events[:-1]) == []
    done = completed(feed(state, events[-1:], start=len(events) - 1))
    assert done.attempt == Attempt("g", 0)
    assert [facts.sample_index for facts in done.trajectories] == [0, 1, 2]
    assert [facts.reward for facts in done.trajectories] == [0.0, 1.0, 2.0]
    assert done.occurred_at == max(event.occurred_at for event in events)


def test_the_end_may_stand_before_the_segments() -> None:
    session = Session()
    claim, start, first, second, end = session.whole()
    done = completed(feed(fresh(1), [claim, end, second, start, first]))
    assert done.trajectories[0].segments == 2


def test_one_event_can_be_a_whole_trajectory() -> None:
    session = Session()
    done = completed(feed(fresh(1), [session.segment(0, [1], [2], end=end_facts(1, reward=0.5))]))
    assert (done.trajectories[0].reward, done.trajectories[0].status) == (0.5, "completed")


def test_a_late_reward_completes_a_trajectory_that_waits_for_it() -> None:
    session = Session()
    events = [session.claim(), session.segment(0, [1], [2]), session.end(1, reward=None, pending=True)]
    state = fresh(1)
    assert feed(state, events) == []
    assert completed(feed(state, [session.reward(0.25)], start=3)).trajectories[0].reward == 0.25


def test_the_first_reward_wins() -> None:
    session = Session()
    events = [
        session.claim(), session.reward(0.1, "one"), session.reward(0.2, "two"), session.segment(0, [1], [2]),
        session.end(1, reward=0.3),
    ]  # fmt: skip
    assert completed(feed(fresh(1), events)).trajectories[0].reward == 0.1


def test_an_end_without_a_reward_waits_for_it_even_if_none_was_promised() -> None:
    """A group of it could not be trained on: the trainer's statistics need every reward."""
    session = Session()
    state = fresh(1)
    assert feed(state, [session.segment(0, [1], [2]), session.end(1, reward=None)]) == []
    assert completed(feed(state, [session.reward(0.5)], start=2)).trajectories[0].reward == 0.5


def test_events_of_an_older_epoch_behind_a_claim_are_void_ends_included() -> None:
    old, new = Session(), Session()
    log = [
        old.claim(1), old.segment(0, [1], [2], version="old"), new.claim(2),
        old.segment(1, [3], [4], version="old", parent=0), old.end(2, reward=-1.0),
        new.segment(1, [3], [5], version="new", parent=0), new.end(2, reward=1.0),
    ]  # fmt: skip
    state = fresh(1)
    facts = completed(feed(state, log)).trajectories[0]
    assert (facts.reward, facts.versions, state.counts["void"]) == (1.0, ("old", "new"), 2)


def test_a_lower_claim_that_comes_later_is_void_itself() -> None:
    high, low = Session(), Session()
    log = [high.claim(5), low.claim(3, restart=True), high.segment(0, [1], [2]), high.end(1)]
    assert completed(feed(fresh(1), log)).trajectories[0].segments == 1


def test_a_restart_voids_everything_before_it() -> None:
    old, new = Session(), Session()
    log = [
        old.claim(1), old.segment(0, [1], [2], version="old"), old.reward(9.0), new.claim(2, restart=True),
        new.segment(0, [1], [3], version="new"), new.reward(1.0), new.end(1, reward=None, pending=True),
    ]  # fmt: skip
    done = completed(feed(fresh(1), log))
    assert (done.trajectories[0].versions, done.trajectories[0].reward) == (("new",), 1.0)
    assert done.sequences[0].tokens.tolist() == [1, 3]


def test_a_settled_trajectory_that_is_restarted_holds_its_group_back_until_it_is_settled_again() -> None:
    one, two = Session(sample=0), Session(sample=1)
    state = fresh(2)
    log = [one.claim(), one.segment(0, [1], [2]), one.end(1), one.claim(2, restart=True), *two.whole()]
    assert feed(state, log) == []
    done = completed(feed(state, [one.segment(0, [1], [3]), one.end(1)], start=len(log)))
    assert done.sequences[0].tokens.tolist() == [1, 3]


def test_an_event_above_the_epoch_is_its_own_claim() -> None:
    old, new = Session(epoch=1), Session(epoch=2)
    log = [old.claim(), new.segment(0, [1], [2]), old.segment(1, [3], [4], parent=0), new.end(1)]
    assert completed(feed(fresh(1), log)).trajectories[0].segments == 1


def test_a_segment_beyond_the_end_changes_nothing_wherever_it_stands() -> None:
    session = Session()
    kept, late, end = session.segment(0, [1], [2]), session.segment(1, [3], [4], parent=0), session.end(1)
    after = completed(feed(fresh(1), [kept, end, late]))
    before = completed(feed(fresh(1), [late, kept, end]))
    assert after.trajectories == before.trajectories
    assert after.occurred_at == before.occurred_at


def test_a_failed_trajectory_fails_the_group_at_once() -> None:
    one, two = Session(sample=0), Session(sample=1)
    state = fresh(2)
    event = failed(feed(state, [two.claim(), two.segment(0, [1], [2], version="v7"), one.claim(),
                                one.end(0, status="failed", reason="agent_error", reward=None)]))  # fmt: skip
    assert (event.reason, event.detail) == ("trajectory_failed", "agent_error")
    assert [(facts.sample_index, facts.version) for facts in event.trajectories] == [(0, ""), (1, "v7")]


@pytest.mark.parametrize(("failures", "lives"), [(1, True), (2, False)])
def test_with_a_minimum_of_live_trajectories_the_group_lives_while_it_can_be_met(
    failures: int, lives: bool
) -> None:
    sessions = [Session(sample=index) for index in range(3)]
    log: list[ev.Event] = []
    for index, session in enumerate(sessions):
        bad = index < failures
        log += [session.claim(), session.segment(0, [1], [2])]
        log.append(session.end(1, status="failed" if bad else "completed", reward=None if bad else 1.0))
    effects = feed(fresh(3, min_live=2), log)
    if lives:
        done = completed(effects)
        assert [facts.status for facts in done.trajectories] == ["failed", "completed", "completed"]
        assert [row.sample_index for row in done.sequences] == [1, 2]
    else:
        assert failed(effects).reason == "trajectory_failed"


def test_a_truncated_trajectory_is_harvested() -> None:
    session = Session()
    log = [session.segment(0, [1], [2]), session.end(1, status="truncated", reason="context_overflow")]
    assert completed(feed(fresh(1), log)).sequences[0].status == "truncated"


def test_a_group_without_a_trainable_token_fails() -> None:
    session = Session()
    event = failed(feed(fresh(1), [session.segment(0, [1], []), session.end(1)]))
    assert (event.reason, event.detail) == ("trajectory_failed", "no trainable tokens")


def test_the_time_out_counts_from_the_first_event_and_gives_a_deterministic_failure() -> None:
    session = Session()
    state = fresh(1, timeout_s=10)
    claim = session.claim()
    feed(state, [claim])
    assert tick(state, claim.occurred_at + 10 * SECOND - 1) == []
    event = failed(tick(state, claim.occurred_at + 99 * SECOND))
    assert (event.reason, event.occurred_at) == ("timeout", claim.occurred_at + 10 * SECOND)
    assert tick(state, claim.occurred_at + 99 * SECOND) == []


def test_events_of_a_closed_attempt_are_dropped_and_counted() -> None:
    closed = ClosedAttempts("run")
    closed.learn(ev.GroupFailed(run_id="run", occurred_at=0, group_id="g", attempt=0, reason="timeout"))
    state = fresh(1, closed=closed)
    assert feed(state, flat(group(size=1, attempt=0))) == []
    assert (state.counts["closed_attempt"], state.groups) == (5, {})
    assert completed(feed(state, flat(group(size=1, attempt=1)), start=5)).attempt == Attempt("g", 1)


def test_another_run_with_a_group_of_the_same_name_closes_nothing() -> None:
    closed = ClosedAttempts("run")
    closed.learn(ev.GroupFailed(run_id="other", occurred_at=0, group_id="g", attempt=0, reason="timeout"))
    assert completed(feed(fresh(1, closed=closed), flat(group(size=1)))).attempt == Attempt("g", 0)


def test_the_end_of_an_attempt_that_nobody_admitted_leaves_the_running_one_alone() -> None:
    state = fresh(1)
    odd = Session(attempt=9)
    feed(state, [Session().claim()])
    assert failed(feed(state, [odd.claim(), odd.end(0, status="failed")], start=1)).attempt == 9
    drop_closed(state)
    assert completed(feed(state, flat(group(size=1)), start=3)).attempt == Attempt("g", 0)


def test_a_reason_of_any_length_fits_into_the_facts_of_a_group() -> None:
    long = "r" * 100_000
    events = [event for index in range(2) for event in
              (Session(sample=index).segment(0, [1], [2]), Session(sample=index).end(1, reason=long))]  # fmt: skip
    assert [len(facts.reason) for facts in completed(feed(fresh(2), events)).trajectories] == [256, 256]
    event = failed(feed(fresh(2), [Session().claim(), Session().end(0, status="failed", reason=long)]))
    assert len(event.detail or "") == len(event.trajectories[0].reason) == 256


def test_a_group_that_others_closed_is_open_no_longer_and_frees_the_mark() -> None:
    state = fresh(2)
    feed(state, flat(group(size=1)))
    assert low_water(state) == 0
    state.closed.add(Attempt("g", 0))
    drop_closed(state)
    assert low_water(state) == 5


@pytest.mark.parametrize("others", [0, 3, 10_000])
def test_however_many_others_were_closed_a_closed_group_is_found(others: int) -> None:
    state = fresh(2)
    drop_closed(state)
    feed(state, flat(group(size=1)))
    for number in range(others // 2):
        state.closed.add(Attempt(f"before-{number}", 0))
    state.closed.decide(Attempt("g", 1))  # the verdict of a later attempt closes this one as well
    for number in range(others // 2):
        state.closed.add(Attempt(f"behind-{number}", 0))
    drop_closed(state)
    assert (len(state.groups), state.counts["closed_by_others"]) == (0, 1)
    drop_closed(state)
    assert state.counts["closed_by_others"] == 1


def test_an_open_group_stays_open_while_others_close() -> None:
    state = fresh(2)
    feed(state, flat(group(size=1, attempt=1)))
    for attempt in (Attempt("g", 0), Attempt("another", 5)):
        state.closed.add(attempt)
        drop_closed(state)
    assert list(state.groups) == [Attempt("g", 1)]


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({"run_id": "another"}, "other_run"),
        ({"kind": "eval"}, "other_kind"),
        ({"kind": "free"}, "other_kind"),
    ],
)
def test_what_is_no_training_traffic_of_this_run_is_counted_and_nothing_else(
    change: dict[str, object], count: str
) -> None:
    state = fresh(1)
    events = [msgspec.structs.replace(event, **change) for event in flat(group(size=1))]
    assert feed(state, events) == []
    assert (state.counts[count], state.groups) == (5, {})


def test_records_that_cannot_be_true_are_rejected_with_their_reason() -> None:
    session = Session()
    good = session.segment(1, [1], [2, 3], parent=0)
    replace = msgspec.structs.replace
    bad = [
        replace(good, sample_index=1),
        replace(good, sample_index=None),
        replace(good, group_id=None),
        replace(good, output_logprobs=b"\0" * 4),
        replace(good, context_ids=b"\0" * 3),
        replace(good, spans=(VersionSpan("v0", 0, 1),)),
        replace(good, parent_segment_index=1),
        replace(good, branch_point=1, parent_segment_index=None),
        replace(good, end=end_facts(2, reward=float("nan"))),
        replace(session.reward(1.0), reward=float("inf")),
    ]
    assert rejected(feed(fresh(1), bad)) == [
        "sample_out_of_range", "sample_out_of_range", "no_group", "logprobs_do_not_fit_output", "torn_token_ids",
        "spans_do_not_cover_output", "parent_is_not_earlier", "branch_without_parent", "reward_not_finite",
        "reward_not_finite",
    ]  # fmt: skip


def test_a_second_trajectory_for_a_sample_is_rejected() -> None:
    session = Session()
    other = msgspec.structs.replace(session.claim(), parent_traj_id="another", session_id="another")
    assert rejected(feed(fresh(2), [session.claim(), other])) == ["sample_has_another_trajectory"]


def test_lineages_that_cannot_be_fail_the_group() -> None:
    session = Session()
    log = [session.segment(0, [1], [2]), session.segment(1, [3], [4], parent=0, branch=9), session.end(2)]
    assert failed(feed(fresh(1), log)).detail == "segment 1 branches beyond its parent"


def test_a_reward_of_an_older_epoch_than_the_restart_is_void_wherever_it_comes() -> None:
    session = Session(epoch=1)
    late = session.reward(0.25, epoch=1)
    state = fresh(size=1)
    effects = feed(
        state,
        [
            session.claim(), session.segment(0, [1], [2]), session.end(1, reward=None, pending=True),
            session.claim(2, restart=True), late, session.segment(0, [1], [3]), session.end(1, reward=None, pending=True),
            session.reward(0.75, epoch=2),
        ],
    )  # fmt: skip
    assert completed(effects).trajectories[0].reward == 0.75
    assert state.counts["void"] == 1


def test_a_reward_of_an_older_epoch_counts_where_nothing_was_started_anew() -> None:
    """A reward worker need not know which replica has the session."""
    session = Session(epoch=1)
    early = session.reward(0.25, epoch=1)
    events = [
        session.claim(), session.segment(0, [1], [2]), session.claim(2), session.end(1, reward=None, pending=True),
        early,
    ]  # fmt: skip
    assert completed(feed(fresh(size=1), events)).trajectories[0].reward == 0.25
