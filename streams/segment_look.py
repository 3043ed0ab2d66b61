"""One attempt looked up in `rollout.segments.v1`, on demand: what nobody keeps is read again when somebody must know.

The feeder needs it rarely (an attempt that may not have been started, a run that stands still), so that following every
token of the run for it would cost more than all else that it does. Only records with the group's key are decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from journal.event_log import read_events
from journal.reader import Record, TopicReader, offsets_at_time
from journal.topic_admin import number_of_partitions, partition_of
from schemas import events as ev
from schemas import topics
from schemas.settings import KafkaSettings, Settings
from streams import assembly
from streams.assembly_closed import Attempt, ClosedAttempts

_MARGIN_US = 60_000_000
"""The broker's records carry the clocks of their writers."""


class AttemptLook(Protocol):
    """What the feeder asks."""

    def started(self, since: Mapping[Attempt, int]) -> set[Attempt]:
        """Attempts of which the log holds an event of a session. `since`: when each was admitted, UTC microseconds."""

    def assembled(self, attempt: Attempt, since_us: int) -> assembly.OpenGroup | None:
        """What an assembler knows of the attempt; None: no event of it."""


class SegmentLook:
    """`AttemptLook` on a broker. TransportError: it cannot be read."""

    def __init__(self, settings: Settings) -> None:
        self._kafka: KafkaSettings = settings.kafka
        self._rules = assembly.AssemblyRules.of(settings)

    def started(self, since: Mapping[Attempt, int]) -> set[Attempt]:
        """Read until all of them were found, at most to the present end."""
        found: set[Attempt] = set()
        for partition, attempts in self._by_partition(since).items():
            missing = dict(attempts)
            for _, event in self._session_events(partition, missing):
                attempt = _attempt_of(event)
                if attempt in missing:
                    found.add(attempt)
                    del missing[attempt]
                if not missing:
                    break
        return found

    def assembled(self, attempt: Attempt, since_us: int) -> assembly.OpenGroup | None:
        """The attempt's events put together as the assembler does it."""
        state = assembly.Assembly(self._rules, ClosedAttempts())
        partition = self._partition(attempt)
        for record, event in self._session_events(partition, {attempt: since_us}):
            if _attempt_of(event) == attempt:
                assembly.apply(state, record.offset, event)
        return state.groups.get(attempt)

    def _by_partition(self, since: Mapping[Attempt, int]) -> dict[int, dict[Attempt, int]]:
        chosen: dict[int, dict[Attempt, int]] = {}
        for attempt, at in since.items():
            chosen.setdefault(self._partition(attempt), {})[attempt] = at
        return chosen

    def _partition(self, attempt: Attempt) -> int:
        return partition_of(attempt.group_id.encode(), number_of_partitions(self._kafka, topics.SEGMENTS))

    def _session_events(
        self, partition: int, since: Mapping[Attempt, int]
    ) -> Iterator[tuple[Record, ev.Event]]:
        keys = {attempt.group_id.encode() for attempt in since}
        start_ms = max(0, min(since.values()) - _MARGIN_US) // 1000
        topic = topics.SEGMENTS
        offset = offsets_at_time(self._kafka, topic, start_ms, [partition])[partition]
        reader = TopicReader(
            self._kafka, [topic], {(topic.name, partition): offset}, {topic.name: [partition]}
        )
        try:
            ours = (record for record in reader.read_to_end() if record.key in keys)
            yield from read_events(ours, on_bad=lambda _record, _wrong: None)
        finally:
            reader.close()


def _attempt_of(event: ev.Event) -> Attempt | None:
    if not isinstance(event, ev.SessionEvent) or event.group_id is None or event.attempt is None:
        return None
    return Attempt(event.group_id, event.attempt)
