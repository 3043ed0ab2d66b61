"""The controller without Faust: raw records of `control.v1` in, the events in order that have still to be written out.

Built anew at every assignment and fed from offset 0; what stands in the output topics already is folded but not given out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from schemas import topics
from schemas.codec import decode
from schemas.errors import SchemaError
from schemas.events import DeadLetter, Effect, Event, identified
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
    headers: Sequence[tuple[str, bytes]]


class ControllerWorker:
    """`written`: per output topic name. `buried`: offsets that are dead letters already."""

    def __init__(self, run_id: str, written: Mapping[str, Written], buried: set[int]) -> None:
        self.state = ControlState(run_id)
        self.staleness = StalenessNumbers()
        self._written = written
        self._buried = buried

    def take(self, record: RawRecord) -> list[Event]:
        """Fold one record. InvariantBroken: the log of effects contradicts the fold."""
        if record.offset < self.state.next_offset:
            return []
        try:
            event = decode(record.value or b"")
            effects = fold(self.state, record.offset, event)
        except SchemaError as wrong:
            self.state.next_offset = record.offset + 1
            return self._dead_letter(record, f"{wrong.code}: {wrong.message}")
        if event.run_id == self.state.run_id:
            self.staleness.told(event, effects, self.state)
        return [effect for effect in effects if self._lacks(effect)]

    def _lacks(self, effect: Effect) -> bool:
        return self._written[topics.TOPIC_OF[type(effect)].name].lacks(effect)

    def _dead_letter(self, record: RawRecord, reason: str) -> list[Event]:
        """Another run's records are its own controller's to bury."""
        run_id = self.state.run_id
        if record.offset in self._buried or record.key not in (None, run_id.encode()):
            return []
        self.state.count("dead_letters")
        letter = DeadLetter(
            run_id=run_id,
            occurred_at=record.timestamp * 1000,
            topic=topics.CONTROL.name,
            partition=0,
            offset=record.offset,
            key=record.key,
            headers=dict(record.headers),
            reason=reason,
            raw=record.value or b"",
        )
        return [identified(letter)]
