"""The controller without Faust: raw records of `control.v1` in, the events in order that have still to be written out.

Built anew at every assignment from a snapshot or from nothing, and fed from there; what stands in the output topics already
is folded but not given out. Effects below `written_below` stand in all of them and are not even made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from schemas import topics
from schemas.codec import decode
from schemas.completed_brief import decode_briefly
from schemas.errors import SchemaError
from schemas.events import Effect, Event
from schemas.letters import letter_of
from streams.control_fold import fold
from streams.control_output import Written
from streams.control_state import ControlState
from streams.staleness_numbers import StalenessNumbers


class RawRecord(Protocol):
    """A record as aiokafka gives it; `timestamp` in milliseconds."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class ControllerWorker:
    """`written`: per output topic name. `buried`: offsets that are dead letters already."""

    def __init__(
        self,
        run_id: str,
        written: Mapping[str, Written],
        buried: set[int],
        state: ControlState | None = None,
    ) -> None:
        self.state = ControlState(run_id) if state is None else state
        self.staleness = StalenessNumbers()
        self.written_below = min((place.last_cause for place in written.values()), default=0)
        self._written = written
        self._buried = buried

    def skim(self, offset: int, key: bytes | None, value: bytes) -> None:
        """Fold a record whose effects are all written, its dead letter too: one below `written_below` or a committed mark."""
        try:
            fold(self.state, offset, decode_briefly(value), quiet=True)
        except SchemaError:
            self._unreadable(offset, key)

    def take(self, record: RawRecord) -> list[Event]:
        """Fold one record. InvariantBroken: the log of effects contradicts the fold."""
        if record.offset < self.state.next_offset:
            return []
        try:
            event = decode(record.value or b"")
            effects = fold(self.state, record.offset, event)
        except SchemaError as wrong:
            ours = self._unreadable(record.offset, record.key)
            return self._dead_letter(record, f"{wrong.code}: {wrong.message}") if ours else []
        if event.run_id == self.state.run_id:
            self.staleness.told(event, effects, self.state)
        return [effect for effect in effects if self._lacks(effect)]

    def _unreadable(self, offset: int, key: bytes | None) -> bool:
        """Pass over a record; whether it is ours to bury: another run's are its own controller's."""
        self.state.next_offset, self.state.last_id = offset + 1, ""
        ours = key in (None, self.state.run_id.encode())
        self.state.count("dead_letters", int(ours))
        return ours

    def _lacks(self, effect: Effect) -> bool:
        return self._written[topics.TOPIC_OF[type(effect)].name].lacks(effect)

    def _dead_letter(self, record: RawRecord, reason: str) -> list[Event]:
        if record.offset in self._buried:
            return []
        letter = letter_of(
            self.state.run_id, topics.CONTROL.name, 0, record.offset, record.timestamp, reason,
            record.key, record.value, record.headers,
        )  # fmt: skip
        return [letter]
