"""What a session may still be taken up from is held, whatever was deleted or restarted; what nobody takes up is not."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from analytics_events import AT, RUN, segment
from hypothesis import given
from hypothesis import strategies as st

from analytics.record_collector import deletable
from analytics.session_holds import MARGIN_US, SessionHolds, Sighting
from schemas import events as ev

HOUR = 3600 * 1_000_000
AGE = 24 * HOUR


def free(name: str, *, ended: bool = False, run: str = RUN) -> ev.TokenSegment:
    end = ev.EndFacts(segment_count=1, status="completed", reason="done") if ended else None
    made = segment("g", 0, 0, end=end)
    return msgspec.structs.replace(
        made, kind="free", session_id=name, group_id=None, attempt=None, run_id=run
    )


def verdict(group: str, attempt: int = 0, outcome: str = "kept") -> ev.Verdict:
    return ev.identified(
        ev.Verdict(
            run_id=RUN, occurred_at=AT, group_id=group, attempt=attempt, outcome=outcome, reason="", cause_offset=0, index=0,  # type: ignore[arg-type]
        )
    )  # fmt: skip


def holds(*records: ev.Event, at: int = AT, start: int = 0) -> SessionHolds:
    made = SessionHolds(RUN, AGE)
    for offset, event in enumerate(records, start):
        made.told(0, offset, at, event)
    return made


def test_an_attempt_holds_its_first_record_until_it_is_judged() -> None:
    made = holds(segment("g", 0, 0), segment("h", 0, 0), segment("g", 1, 0))
    assert made.lowest(AT) == {0: 0}
    made.judged(verdict("g"))
    assert made.lowest(AT) == {0: 1}
    made.told(0, 3, AT, segment("g", 2, 0))  # late, of an attempt that is over
    made.judged(verdict("h", outcome="dropped"))
    assert made.lowest(AT) == {}


def test_a_retry_ends_one_attempt_and_not_the_next() -> None:
    made = holds(segment("g", 0, 0), segment("g", 0, 0, attempt=1))
    made.judged(verdict("g", outcome="retry"))
    assert made.lowest(AT) == {0: 1}


def test_a_verdict_ends_the_attempts_before_it_too() -> None:
    """Its own verdict may stand in front of what the archive still has."""
    made = holds()
    made.judged(verdict("g", 1))
    made.told(0, 0, AT, segment("g", 0, 0))
    assert made.lowest(AT) == {}


def test_a_session_of_no_group_is_held_as_long_as_it_is_looked_for_ended_or_not() -> None:
    for record in (free("s"), free("s", ended=True)):
        made = holds(record, start=7)
        assert made.lowest(AT + AGE) == {0: 7}
        assert made.lowest(AT + AGE + MARGIN_US + 60_000_001) == {}


def test_each_record_of_an_open_session_makes_its_time_begin_anew() -> None:
    made = holds(free("s"))
    made.told(0, 1, AT + AGE, free("s"))
    assert made.lowest(AT + 2 * AGE) == {0: 0}
    assert made.lowest(AT + 3 * AGE) == {}


def test_another_runs_record_is_held_for_good() -> None:
    made = holds(free("s", run="other"))
    assert made.lowest(AT + 1000 * AGE) == {0: 0}


def test_ended_sessions_leave_a_number_a_minute() -> None:
    made = SessionHolds(RUN, AGE)
    for number in range(5_000):
        made.told(0, number, AT + number, free(f"s{number}", ended=True))
    assert not made._sessions[0]
    assert len(made._ended[0]) <= 2


def test_only_what_lies_below_every_bound_goes() -> None:
    first, archived = {0: 2, 1: 0, 2: 0, 3: 5}, {0: 9, 1: 9, 2: 9, 3: 9}
    marks, held, young = {0: 8, 1: 9, 3: 5}, {0: 6, 1: 9}, {0: 7, 1: 4, 2: 9, 3: 9}
    assert deletable(first, archived, marks, held, young) == {0: range(2, 6), 1: range(4)}
    assert deletable(first, {}, marks, held, young) == {}


RECORDS = st.lists(
    st.tuples(
        st.sampled_from(["g0", "g1", "free0", "free1", "verdict0", "verdict1"]),
        st.integers(0, 1),  # partition
        st.integers(0, 1),  # attempt, or whether it ends
        st.integers(0, 12),  # hours since the record before
    ),
    max_size=40,
)


@given(RECORDS, st.integers(0, 48))
def test_no_record_that_a_session_may_be_taken_up_from_lies_below_the_hold(
    steps: list[tuple[str, int, int, int]], later: int
) -> None:
    """The same from the archive's summary after a restart, and neither holds anything once all are old."""
    running, restarted = SessionHolds(RUN, AGE), SessionHolds(RUN, AGE)
    now, log, judged = AT, [], []
    for offset, (name, partition, number, hours) in enumerate(steps):
        now += hours * HOUR
        if name.startswith("verdict"):
            judged.append(verdict(f"g{name[-1]}", number))
            running.judged(judged[-1])
            continue
        event = free(name, ended=bool(number)) if "free" in name else segment(name, 0, 0, attempt=number)
        log.append((partition, offset, now, event))
        running.told(*log[-1])
    for one in judged:
        restarted.judged(one)
    for seen in summary(log):
        restarted.saw(seen)
    now += later * HOUR
    needed = still_needed(log, judged, now)
    for found in (running.lowest(now), restarted.lowest(now)):
        assert all(found[partition] <= offset for partition, offset in needed.items())
    for made in (running, restarted):
        assert made.lowest(now + 2 * AGE) == {}


def still_needed(
    log: Iterable[tuple[int, int, int, ev.TokenSegment]], judged: Iterable[ev.Verdict], now: int
) -> dict[int, int]:
    """Straight from the rule: the first record of everything that is younger than a session is looked for. What comes behind
    the end of a session without a group begins anew."""
    over = {(one.group_id, number) for one in judged for number in range(one.attempt + 1)}
    tries: dict[tuple[int, object], list[list[int]]] = {}  # of each its first offset and its newest time
    ended: set[tuple[int, object]] = set()
    for partition, offset, at, event in log:
        key = partition, (event.group_id, event.attempt) if event.kind == "train" else event.session_id
        if key[1] in over:
            continue
        known = tries.setdefault(key, [])
        if not known or key in ended:
            known.append([offset, at])
        known[-1][1] = at
        ended.discard(key)
        if event.kind == "free" and event.end is not None:
            ended.add(key)
    lowest: dict[int, int] = {}
    for (partition, _), known in tries.items():
        for first, newest in known:
            if now - newest <= AGE:
                lowest[partition] = min(first, lowest.get(partition, first))
    return lowest


def summary(log: Iterable[tuple[int, int, int, ev.TokenSegment]]) -> list[Sighting]:
    """As the archive gives it."""
    found: dict[tuple[int, str, int | None], Sighting] = {}
    for partition, offset, at, event in log:
        key = (partition, event.session_id, event.attempt)
        known = found.get(key)
        found[key] = Sighting(
            partition, known.first if known else offset, at, RUN, event.kind, event.session_id, event.group_id,
            event.attempt, event.end is not None or (known is not None and known.ended),
        )  # fmt: skip
    return list(found.values())
