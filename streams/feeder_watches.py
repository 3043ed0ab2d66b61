"""What the feeder looks after besides admission: attempts that nobody started, and a run that stands still."""

from __future__ import annotations

from journal.clock import Clock
from schemas import events as ev
from schemas.completed_brief import CompletedBrief
from schemas.settings import Settings
from streams.admission import AdmissionState
from streams.admission_bounds import Limits
from streams.progress_watch import ProgressWatch
from streams.segment_look import AttemptLook
from streams.start_watch import StartWatch


class Watches:
    """Begins to count when it is made."""

    def __init__(self, settings: Settings, look: AttemptLook, clock: Clock) -> None:
        run_id, watchdog = settings.run.run_id, settings.watchdog
        self._clock = clock
        self._starts = StartWatch(run_id, settings.feeder.start_timeout_s, look, clock())
        self._progress = ProgressWatch(
            run_id, Limits.of(settings), watchdog.no_progress_s, look, clock(), end_group=watchdog.end_group
        )

    def told(self, event: ev.Event | CompletedBrief) -> None:
        """An event was read."""
        self._progress.told(event, self._clock())

    def look_at(self, state: AdmissionState) -> list[ev.GroupFailed | ev.Alarm]:
        """What has to be published now. TransportError: the log cannot be read."""
        found: list[ev.GroupFailed | ev.Alarm] = [*self._starts.failures(state, self._clock())]
        if not found and (stalled := self._progress.look_at(state, self._clock())) is not None:
            found += [event for event in stalled if event is not None]
        return found

    @property
    def alarms(self) -> int:
        """Said so far."""
        return self._progress.alarms

    def idle_s(self) -> float:
        """Seconds since something moved in the run."""
        return self._progress.idle_s(self._clock())
