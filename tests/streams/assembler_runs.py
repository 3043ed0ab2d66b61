"""Running a log through the reducer, and looking at what comes out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from schemas import events as ev
from streams.assembly import Assembly, AssemblyRules, Completed, Effect, Failed, Rejected, apply
from streams.assembly_closed import ClosedAttempts

SECOND = 1_000_000


def fresh(
    size: int = 3, *, min_live: int = 0, timeout_s: int = 300, closed: ClosedAttempts | None = None
) -> Assembly:
    return Assembly(AssemblyRules("run", size, timeout_s * SECOND, min_live), closed or ClosedAttempts("run"))


def feed(state: Assembly, events: Iterable[ev.Event], start: int = 0) -> list[Effect]:
    return [effect for offset, event in enumerate(events, start) for effect in apply(state, offset, event)]


def flat(sessions: Iterable[Sequence[ev.Event]]) -> list[ev.Event]:
    return [event for session in sessions for event in session]


def completed(effects: Sequence[Effect]) -> Completed:
    (only,) = [effect for effect in effects if not isinstance(effect, Rejected)]
    assert isinstance(only, Completed), only
    return only


def failed(effects: Sequence[Effect]) -> ev.GroupFailed:
    (only,) = [effect for effect in effects if not isinstance(effect, Rejected)]
    assert isinstance(only, Failed), only
    return only.event


def rejected(effects: Sequence[Effect]) -> list[str]:
    return [effect.reason for effect in effects if isinstance(effect, Rejected)]
