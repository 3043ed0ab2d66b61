"""Replay into Kafka: archived segments and control events under a new run id, for live assembler and controller.

The assembler's own results stay out: where one stood in the recorded control log, its attempt's segments are sent and the
live result is awaited before the log goes on. So versions, requests and results meet in the recorded order, and a verdict
differs only where results of one moment arrive in another order, or where time itself had decided (a time-out).
The feeder's, trainer's and proxy's events come from the archive; those processes do not run. Times are those of the replay:
a control event occurs when it is put back, an attempt begins when its first event is.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import duckdb
import msgspec
import structlog

from analytics.archived_log import (
    Archived,
    live_session_events,
    recorded_settings,
    run_id_of,
    unique_events,
)
from analytics.archived_payloads import ArchivedPayloads
from analytics.catalog import connect
from analytics.replay_ids import ReplayIds
from journal.clock import Clock, system_clock
from journal.event_log import EventFollower
from journal.payloads import PayloadStore
from journal.producer import AckProducer
from journal.topic_admin import create_topics
from schemas import events as ev
from schemas.errors import ArchiveError, ConfigError
from schemas.settings import Settings
from schemas.topics import BATCHES, CONTROL

Attempt = tuple[str, int]
NOT_AWAITED = frozenset({"timeout"})
FEEDERS_REASONS = ("not_started", "no_progress")
log = structlog.get_logger()


class ReplayReport(msgspec.Struct, frozen=True):
    """What was put back. `missing`: attempts (new ids) whose recorded result did not come again in time."""

    run_id: str
    new_run_id: str
    control_events: int
    session_events: int
    results: int
    missing: tuple[Attempt, ...]
    ended: bool


def replay_settings(run_dir: Path, new_run_id: str, directory: str | None = None) -> Settings:
    """Settings for the new run: the recorded ones under the new id, with no broker and no engine named.

    Start the broker, assembler, controller and archiver with them (`kafka.bootstrap_servers` filled in), then replay.
    """
    connection = connect(run_dir)
    try:
        tree = recorded_settings(connection, run_id_of(connection, run_dir)).model_dump(mode="json")
    finally:
        connection.close()
    if new_run_id == tree["run"]["run_id"]:
        raise ConfigError("a replay needs a run id of its own", key="run.run_id", value=new_run_id)
    tree["run"] |= {"run_id": new_run_id, "directory": directory or str(run_dir.absolute().parent)}
    tree["kafka"]["bootstrap_servers"] = ""
    tree["payload"]["url"] = ""
    tree["proxy"]["engines"] = []
    return Settings.model_validate(tree)


def replay_into(
    run_dir: Path, target: Settings, patience_s: float = 60.0, clock: Clock = system_clock
) -> ReplayReport:
    """Put the run's archive into the target's topics (created when missing) and wait until the controller ended the run."""
    connection = connect(run_dir)
    try:
        replay = _Replay(connection, run_dir, target, patience_s, clock)
    finally:
        connection.close()
    try:
        return replay.run()
    finally:
        replay.close()


class _Replay:
    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        run_dir: Path,
        target: Settings,
        patience_s: float,
        clock: Clock,
    ) -> None:
        self._old_run = run_id_of(connection, run_dir)
        self._target = target
        self._patience_s = patience_s
        self._clock = clock
        self._control = list(unique_events(connection, "control", self._old_run))
        sessions = live_session_events(connection, self._old_run)
        source = ArchivedPayloads(run_dir, recorded_settings(connection, self._old_run))
        sink = PayloadStore(target.payload_url)

        def copy(ref: ev.PayloadRef, group: str, attempt: int) -> ev.PayloadRef:
            return sink.put(target.run.run_id, group, attempt, source.get(ref), ref.codec)

        self._ids = ReplayIds(self._old_run, target.run.run_id, sessions, copy)
        self._sessions: dict[Attempt | None, list[ev.Event]] = defaultdict(list)
        for event in sessions:
            self._sessions[_attempt_of(event)].append(event)
        create_topics(target.kafka)
        self._producer = AckProducer(target.kafka, "replay")
        self._follower = EventFollower(target.kafka, (CONTROL, BATCHES))
        self._results: set[Attempt] = set()
        self._ended = False
        self._awaited: list[Attempt] = []
        self._missing: list[Attempt] = []
        self._sent_control = self._sent_sessions = 0

    def run(self) -> ReplayReport:
        """All events, then the end of the run."""
        self._configure()
        self._send_sessions(None)
        for record in self._control:
            if isinstance(record.event, ev.GroupCompleted | ev.GroupFailed) and not _is_feeders(record.event):
                self._result(record.event)
            elif not isinstance(record.event, ev.RunConfigured | ev.RunEnded):
                self._send_control(record.event)
        self._await_results()
        for attempt in list(self._sessions):  # what was still under way when the run ended
            self._send_sessions(attempt)
        self._end()
        return ReplayReport(
            self._old_run, self._target.run.run_id, self._sent_control, self._sent_sessions, len(self._results),
            tuple(self._missing), self._ended,
        )  # fmt: skip

    def close(self) -> None:
        self._follower.close()
        self._producer.close()

    def _configure(self) -> None:
        first = _first(self._control, ev.RunConfigured)
        settings = self._target
        configured = msgspec.structs.replace(
            first,
            run_id=settings.run.run_id,
            settings=settings.to_json(),
            settings_digest=settings.digest(),
            occurred_at=self._clock(),
        )
        self._producer.publish(ev.identified(configured))
        self._sent_control += 1

    def _send_control(self, event: ev.Event) -> None:
        self._await_results()
        self._producer.send(self._ids.rewrite(event, self._clock() - event.occurred_at))
        self._sent_control += 1

    def _result(self, event: ev.GroupCompleted | ev.GroupFailed) -> None:
        """Results that stood side by side are awaited together."""
        attempt = (event.group_id, event.attempt)
        self._send_sessions(attempt)
        waits = not isinstance(event, ev.GroupFailed) or event.reason not in NOT_AWAITED
        if waits:
            self._awaited.append((self._ids.group(event.group_id), event.attempt))

    def _send_sessions(self, attempt: Attempt | None) -> None:
        events = self._sessions.pop(attempt, [])
        shift = self._clock() - events[0].occurred_at if events else 0
        for event in events:
            self._producer.send(self._ids.rewrite(event, shift))
            self._sent_sessions += 1

    def _await_results(self) -> None:
        if not self._awaited:
            return
        self._producer.flush()
        deadline = time.monotonic() + self._patience_s
        while not self._results.issuperset(self._awaited) and time.monotonic() < deadline:
            self._follow()
        late = [attempt for attempt in self._awaited if attempt not in self._results]
        if late and not self._results:
            raise ArchiveError(
                "no live assembler answers under the new run id",
                run_id=self._target.run.run_id,
                patience_s=self._patience_s,
            )
        if late:
            log.warning("results did not come again in time", attempts=late[:10], count=len(late))
        self._missing += late
        self._awaited.clear()

    def _follow(self) -> None:
        for _, event in self._follower.poll(0.5):
            if event.run_id != self._target.run.run_id:
                continue
            if isinstance(event, ev.GroupCompleted | ev.GroupFailed):
                self._results.add((event.group_id, event.attempt))
            self._ended = self._ended or isinstance(event, ev.EndOfBatches)

    def _end(self) -> None:
        """A run that was archived before its end is ended, too: every group shall have its verdict."""
        recorded = [record.event for record in self._control if isinstance(record.event, ev.RunEnded)]
        last = self._control[-1].event
        end = (
            recorded[0]
            if recorded
            else ev.RunEnded(run_id="", occurred_at=last.occurred_at, reason="replay_ended")
        )
        self._producer.send(self._ids.rewrite(end, self._clock() - end.occurred_at))
        self._sent_control += 1
        self._producer.flush()
        deadline = time.monotonic() + self._patience_s
        while not self._ended and time.monotonic() < deadline:
            self._follow()


def _attempt_of(event: ev.Event) -> Attempt | None:
    """Events of a training attempt go with it; all others need no result."""
    group, attempt = getattr(event, "group_id", None), getattr(event, "attempt", None)
    return None if group is None or attempt is None or event.kind != "train" else (group, attempt)


def _is_feeders(event: ev.GroupCompleted | ev.GroupFailed) -> bool:
    return isinstance(event, ev.GroupFailed) and event.reason in FEEDERS_REASONS


def _first(records: list[Archived], event_type: type[ev.RunConfigured]) -> ev.RunConfigured:
    return next(record.event for record in records if isinstance(record.event, event_type))
