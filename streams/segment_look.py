"""One attempt looked up in `rollout.segments.v1`, on demand: what nobody keeps is read again when somebody must know.

The feeder needs it rarely (an attempt that may not have been started, a run that stands still), so that following every
token of the run for it would cost more than all else that it does. Only records with the group's key are decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from journal.event_log import read_events
from journal.reader import Record, TopicReader, offsets_at_time
from journal.topic_admin import number_of_partitions, partition_of
from schemas import events as ev
from schemas import topics
from schemas.settings import KafkaSettings, Settings
from streams import assembly
from streams.assembly_closed import Attempt
from streams.assembly_trajectory import Trajectory, impossible

_MARGIN_US = 60_000_000
"""The broker's records carry the clocks of their writers."""


class AttemptLook(Protocol):
    """What the feeder asks."""

    def started(self, since: Mapping[Attempt, int]) -> set[Attempt]:
        """Attempts of which the log holds an event of a session. `since`: when each was admitted, UTC microseconds."""

    def assembled(self, attempt: Attempt, since_us: int) -> assembly.OpenGroup | None:
        """What an assembler knows of the attempt; None: no event of it."""


class SegmentLook:
    """`AttemptLook` on a broker. TransportError: it cannot be read. Large columns stay where they are referred to."""

    def __init__(self, settings: Settings) -> None:
        self._kafka: KafkaSettings = settings.kafka
        self._run_id, self._group_size = settings.run.run_id, settings.group.size

    def started(self, since: Mapping[Attempt, int]) -> set[Attempt]:
        """Read until all of them were found, at most to the present end."""
        found: set[Attempt] = set()
        for partition, attempts in self._by_partition(since).items():
            missing = dict(attempts)
            for _, event in self._session_events(partition, missing):
                attempt = self._attempt_of(event)
                if attempt in missing:
                    found.add(attempt)
                    del missing[attempt]
                if not missing:
                    break
        return found

    def assembled(self, attempt: Attempt, since_us: int) -> assembly.OpenGroup | None:
        """The attempt's events put together, but for its end: who asks wants to know what an open group holds."""
        events = (event for _, event in self._session_events(self._partition(attempt), {attempt: since_us}))
        return put_together(event for event in events if self._attempt_of(event) == attempt)

    def _attempt_of(self, event: ev.Event) -> Attempt | None:
        """Of an event that an assembler takes; one that it buries opens nothing there, and no time-out of its would follow."""
        if (
            not isinstance(event, ev.SessionEvent | ev.RewardAssigned)
            or event.run_id != self._run_id
            or event.kind != "train"
            or event.group_id is None
            or event.attempt is None
        ):
            return None
        elsewhere = isinstance(event, ev.TokenSegment) and event.tokens_ref is not None
        if not elsewhere and impossible(event, self._group_size):
            return None
        return Attempt(event.group_id, event.attempt)

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


def put_together(events: Iterable[ev.Event]) -> assembly.OpenGroup | None:
    """One attempt from its events in log order, whether or not it is complete; None: there are none."""
    group: assembly.OpenGroup | None = None
    for event in events:
        if not isinstance(event, ev.SessionEvent | ev.RewardAssigned):
            continue
        if group is None:
            group = assembly.OpenGroup(0, event.occurred_at, event.policy_id)
        trajectory = group.trajectories.setdefault(event.parent_traj_id, Trajectory(event.parent_traj_id))
        if isinstance(event, ev.RewardAssigned):
            trajectory.take_reward(event)
        elif event.sample_index is not None:
            trajectory.sample_index = event.sample_index
            group.samples[event.sample_index] = event.parent_traj_id
            trajectory.take(event)
    return group
