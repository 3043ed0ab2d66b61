"""Which records of `rollout.segments.v1` a session may still be taken up from: a fold over that topic and the verdicts. Pure.

* The sessions of an attempt hold its first record until the attempt is judged; from then on its sessions get 410, or were
  complete when it was kept.
* A session of no attempt (`free`, `eval`) holds its first record for as long as a proxy looks for sessions in the log, ended
  or not: within that time a call under its name must find its end, and not begin a second session.
* Whoever was silent for so long holds nothing: no proxy looks for it any more.
* A record of another run holds itself for good: what that run still needs, nobody here knows.

Told every record, in log order per partition; verdicts in any order to them. State follows what is open: of ended sessions
one number per minute is left.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from schemas import events as ev
from streams.assembly_closed import Attempt, ClosedAttempts

_MINUTE_US = 60_000_000
MARGIN_US = _MINUTE_US
"""Times are those of the records' writers."""


class Sighting(NamedTuple):
    """Records of one session, or of none: offset of the first, time of the newest (UTC microseconds), and whose they are."""

    partition: int
    first: int
    newest_us: int
    run_id: str
    kind: str
    session_id: str | None
    group_id: str | None
    attempt: int | None
    ended: bool


class _Held(NamedTuple):
    first: int
    newest_us: int


class SessionHolds:
    """`age_us`: how far back a session is looked for."""

    def __init__(self, run_id: str, age_us: int) -> None:
        self._run_id, self._age_us = run_id, age_us + MARGIN_US
        self._closed = ClosedAttempts(run_id)
        self._attempts: dict[str, dict[int, dict[int, _Held]]] = {}  # by group, attempt and partition
        self._sessions: dict[int, dict[Hashable, _Held]] = {}  # by partition
        self._ended: dict[int, dict[int, int]] = {}  # by partition: first offset by minute
        self._foreign: dict[int, int] = {}

    def told(self, partition: int, offset: int, at_us: int, event: ev.Event) -> None:
        """One record of the segments topic."""
        session = event if isinstance(event, ev.SessionEvent) else None
        self.saw(
            Sighting(
                partition, offset, at_us, event.run_id, event.kind,
                session.session_id if session is not None else None,
                session.group_id if session is not None else None,
                session.attempt if session is not None else None,
                getattr(event, "end", None) is not None,
            )
        )  # fmt: skip

    def saw(self, seen: Sighting) -> None:
        """The same, of several records at once."""
        if seen.run_id != self._run_id:
            self._foreign.setdefault(seen.partition, seen.first)
        elif seen.session_id is None:
            return
        elif seen.kind == "train" and seen.group_id is not None and seen.attempt is not None:
            self._saw_attempt(Attempt(seen.group_id, seen.attempt), seen)
        else:
            self._saw_session(seen.session_id, seen)

    def judged(self, verdict: ev.Verdict) -> None:
        """The attempt, and those before it, need their records no more."""
        if verdict.run_id != self._run_id:
            return
        self._closed.decide(Attempt(verdict.group_id, verdict.attempt))
        attempts = self._attempts.get(verdict.group_id, {})
        for number in [number for number in attempts if number <= verdict.attempt]:
            del attempts[number]
        if not attempts:
            self._attempts.pop(verdict.group_id, None)

    def lowest(self, now_us: int) -> dict[int, int]:
        """Per partition the first record that must stay; none where nothing is held."""
        self._forget(now_us - self._age_us)
        held = dict(self._foreign)

        def hold(partition: int, first: int) -> None:
            held[partition] = min(first, held.get(partition, first))

        for attempts in self._attempts.values():
            for places in attempts.values():
                for partition, one in places.items():
                    hold(partition, one.first)
        for partition, sessions in self._sessions.items():
            for one in sessions.values():
                hold(partition, one.first)
        for partition, minutes in self._ended.items():
            for first in minutes.values():
                hold(partition, first)
        return held

    def _saw_attempt(self, attempt: Attempt, seen: Sighting) -> None:
        if attempt in self._closed:
            return
        places = self._attempts.setdefault(attempt.group_id, {}).setdefault(attempt.attempt, {})
        places[seen.partition] = _joined(places.get(seen.partition), seen)

    def _saw_session(self, session_id: str, seen: Sighting) -> None:
        sessions = self._sessions.setdefault(seen.partition, {})
        held = _joined(sessions.get(session_id), seen)
        if not seen.ended:
            sessions[session_id] = held
            return
        sessions.pop(session_id, None)
        minutes = self._ended.setdefault(seen.partition, {})
        minute = held.newest_us // _MINUTE_US + 1
        minutes[minute] = min(held.first, minutes.get(minute, held.first))

    def _forget(self, before_us: int) -> None:
        for group, attempts in list(self._attempts.items()):
            for number, places in list(attempts.items()):
                if all(one.newest_us < before_us for one in places.values()):
                    del attempts[number]
            if not attempts:
                del self._attempts[group]
        for sessions in self._sessions.values():
            for name in [name for name, one in sessions.items() if one.newest_us < before_us]:
                del sessions[name]
        for minutes in self._ended.values():
            for minute in [minute for minute in minutes if minute * _MINUTE_US < before_us]:
                del minutes[minute]


def _joined(held: _Held | None, seen: Sighting) -> _Held:
    if held is None:
        return _Held(seen.first, seen.newest_us)
    return _Held(min(held.first, seen.first), max(held.newest_us, seen.newest_us))
