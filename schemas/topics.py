"""Topics: names, partitions, keys, retention, and which events stand in which. All names come from here.

Kafka's default retention would delete the log after 7 days; here nothing is deleted but by the archiver, and only from
`rollout.segments.v1` (design §3).
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas import events as ev
from schemas.ids import topic_name

RETENTION: dict[str, str] = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
MAX_RECORD_BYTES = 8_000_000
"""Of one record. The facts of a group of a thousand trajectories and the manifest of a batch of a thousand groups are several
times the 1 MB of Kafka's and its clients' defaults, and a processor that cannot write what it decided would stand still."""
SIZES: dict[str, int] = {"max.message.bytes": 8_388_608}
"""At least; a broker counts a record with the batch around it."""


@dataclass(frozen=True, slots=True)
class Topic:
    """`partitions` None: as many as the setting `kafka.partitions` says. `events`: what may stand in it."""

    name: str
    key: str
    partitions: int | None
    events: tuple[type[ev.Event], ...]

    def full_name(self, prefix: str) -> str:
        """Name at the broker."""
        return topic_name(prefix, self.name)


PROMPTS = Topic("rollout.prompts.v1", "group_id", None, (ev.GroupRequested,))
SEGMENTS = Topic(
    "rollout.segments.v1",
    "group_id",
    None,
    (ev.SessionClaimed, ev.TrajectoryStarted, ev.TokenSegment, ev.TrajectoryEnded, ev.RewardAssigned),
)
CONTROL = Topic(
    "control.v1",
    "run_id",
    1,
    (
        ev.RunConfigured, ev.RunEnded, ev.GroupAdmitted, ev.DatasetEnded, ev.GroupCompleted, ev.GroupFailed, ev.PolicyPublished,
        ev.BatchRequested, ev.StepCompleted, ev.RolledBack, ev.PolicyActivated, ev.Alarm,
    ),
)  # fmt: skip
VERDICTS = Topic("rollout.verdicts.v1", "group_id", 1, (ev.Verdict,))
BATCHES = Topic("train.batches.v1", "run_id", 1, (ev.TrainBatch, ev.EndOfBatches))
FEEDBACK = Topic("train.feedback.v1", "group_id", None, (ev.SequenceFeedback,))
DEAD_LETTERS = Topic("dead_letters.v1", "source", 1, (ev.DeadLetter,))

ALL_TOPICS: tuple[Topic, ...] = (PROMPTS, SEGMENTS, CONTROL, VERDICTS, BATCHES, FEEDBACK, DEAD_LETTERS)
TOPIC_OF: dict[type[ev.Event], Topic] = {event: topic for topic in ALL_TOPICS for event in topic.events}


def key_of(event: ev.Event) -> bytes:
    """Record key of an event: the group keeps its trajectories in one partition; free sessions go by their own id."""
    topic = TOPIC_OF[type(event)]
    if isinstance(event, ev.DeadLetter):
        return f"{event.topic}/{event.partition}".encode()
    if topic.key == "run_id":
        return event.run_id.encode()
    group = getattr(event, "group_id", None)
    return str(group if group is not None else getattr(event, "session_id", None) or event.run_id).encode()
