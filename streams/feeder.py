"""The feeder: keeps groups in flight under the admission bound, acts on retries, and ends what nobody started. It alone admits.

All its knowledge is the log: `control.v1`, the verdicts and the end mark, folded from the start into `AdmissionState`. It
keeps nothing, so a restart stands exactly where the log stands. `GroupAdmitted` is acknowledged before `GroupRequested` is
sent: an attempt without a request is requested again at the next start, one without an admission never ran.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import structlog

from journal.clock import Clock, system_clock
from journal.event_log import EventFollower, read_events
from journal.log_setup import configure_logging
from journal.metrics_http import serve_metrics
from journal.payloads import PayloadStore
from journal.producer import AckProducer
from journal.reader import TopicReader, offsets_at_time
from journal.topic_admin import create_topics, wait_for_broker
from schemas import events as ev
from schemas import ids, topics
from schemas.arrow import REQUEST_CODEC
from schemas.completed_brief import CompletedBrief, decode_briefly
from schemas.errors import ConfigError, HoofprintError
from schemas.settings import KafkaSettings, Settings
from streams.admission import Admission, AdmissionState, Prompt, PromptOrder
from streams.admission_bounds import Limits, free_places
from streams.feeder_dataset import load_prompts, prompt_digest, prompt_text
from streams.feeder_watches import Watches
from streams.segment_look import SegmentLook
from streams.stream_numbers import feeder_numbers

log = structlog.get_logger()
_POLL_S = 0.2
_AT_ONCE = 256
_MARGIN_US = 60_000_000
"""A record carries the clock of whoever wrote it: of an earlier feeder, perhaps on another machine."""
_FOLLOWED = (topics.CONTROL, topics.VERDICTS, topics.BATCHES)


class Feeder:
    """`step` once the log is folded: retries, then new prompts, then the end of the dataset."""

    def __init__(
        self,
        settings: Settings,
        prompts: Sequence[Mapping[str, Any]],
        producer: AckProducer,
        store: PayloadStore,
        clock: Clock = system_clock,
    ) -> None:
        self._settings = settings
        self._run_id = settings.run.run_id
        self._prompts = prompts
        self._producer = producer
        self._store = store
        self._clock = clock
        feeder = settings.feeder
        self._limits = Limits.of(settings)
        self._digests: dict[int, str] = {}
        self.state = AdmissionState(self._run_id)
        order = PromptOrder(len(prompts), feeder.epochs, shuffle=feeder.shuffle, seed=settings.run.seed)
        self._remaining = order.remaining(self.state)
        self._peeked: Prompt | None = None

    def fold(self, event: ev.Event | CompletedBrief) -> None:
        """Take an event of the log in. ConfigError: the dataset is not the one that the run began with."""
        if isinstance(event, ev.GroupAdmitted) and event.run_id == self._run_id:
            self._check_prompt(event)
        self.state.fold(event)

    def _check_prompt(self, event: ev.GroupAdmitted) -> None:
        index = event.prompt_index
        if index >= len(self._prompts) or self._digest(index) != event.prompt_digest:
            raise ConfigError(
                f"prompt {index} of the dataset is not the one that the run admitted as {event.group_id}",
                prompt_index=index,
                group_id=event.group_id,
            )

    def _digest(self, index: int) -> str:
        if index not in self._digests:
            self._digests[index] = prompt_digest(prompt_text(self._prompts[index]))
        return self._digests[index]

    def request_missing(self, requested: set[tuple[str, int]]) -> int:
        """After a restart: what was admitted, may still run and never reached the prompts topic."""
        missing = self.state.unrequested(requested)
        self._request(missing)
        return len(missing)

    def step(self) -> int:
        """Admit and request what the bound allows; how many attempts that were."""
        state = self.state
        if state.ended or not state.activated:
            return 0
        attempts = state.next_retries()
        free = 0
        if not state.dataset_ended:
            free = min(free_places(state, self._limits, self._clock()), _AT_ONCE)
        attempts += [Admission(prompt, None, 0) for prompt in self._take(free)]
        if attempts:
            self._admit(attempts)
        if not state.dataset_ended and self._peek() is None:
            self._end_dataset()
        return len(attempts)

    def report(self, events: Sequence[ev.GroupFailed | ev.Alarm]) -> None:
        """Attempts that the feeder itself ends (the controller decides what becomes of their groups), and alarms."""
        self._publish(events)
        for event in events:
            self.state.fold(event)
            log.warning("reported", report=type(event).__name__, **_words(event))

    def _take(self, count: int) -> Iterator[Prompt]:
        for _ in range(count):
            prompt = self._peek()
            if prompt is None:
                return
            self._peeked = None
            yield prompt

    def _peek(self) -> Prompt | None:
        """The next prompt; None: all of them are admitted."""
        if self._peeked is None:
            self._peeked = next(self._remaining, None)
        return self._peeked

    def _admit(self, attempts: Iterable[Admission]) -> None:
        admitted = [self._admission(attempt) for attempt in attempts]
        self._publish(admitted)
        for event in admitted:
            self.state.fold(event)
        self._request(
            [
                Admission(Prompt(event.dataset_epoch, event.prompt_index), event.group_id, event.attempt)
                for event in admitted
            ]
        )

    def _admission(self, attempt: Admission) -> ev.GroupAdmitted:
        prompt = attempt.prompt
        group = attempt.group_id or ids.group_id(self._run_id, prompt.dataset_epoch, prompt.prompt_index)
        return ev.identified(
            ev.GroupAdmitted(
                run_id=self._run_id,
                occurred_at=self._clock(),
                group_id=group,
                attempt=attempt.attempt,
                group_size=self._settings.group.size,
                prompt_index=prompt.prompt_index,
                dataset_epoch=prompt.dataset_epoch,
                prompt_digest=self._digest(prompt.prompt_index),
            )
        )

    def _request(self, attempts: Iterable[Admission]) -> None:
        self._publish([self._request_of(attempt) for attempt in attempts])

    def _request_of(self, attempt: Admission) -> ev.GroupRequested:
        assert attempt.group_id is not None
        text: str | None = prompt_text(self._prompts[attempt.prompt.prompt_index])
        assert text is not None
        ref, raw = None, text.encode()
        if len(raw) > self._settings.payload.max_inline_bytes:
            ref = self._store.put(self._run_id, attempt.group_id, attempt.attempt, raw, REQUEST_CODEC)
            text = None
        return ev.identified(
            ev.GroupRequested(
                run_id=self._run_id,
                occurred_at=self._clock(),
                group_id=attempt.group_id,
                attempt=attempt.attempt,
                group_size=self._settings.group.size,
                prompt_index=attempt.prompt.prompt_index,
                dataset_epoch=attempt.prompt.dataset_epoch,
                prompt=text,
                prompt_ref=ref,
            )
        )

    def _end_dataset(self) -> None:
        """Every prompt of every pass is admitted."""
        ended = ev.DatasetEnded(
            run_id=self._run_id, occurred_at=self._clock(), groups=self.state.admitted_groups
        )
        self._publish([ev.identified(ended)])
        self.state.dataset_ended = True
        log.info("dataset_ended", groups=ended.groups)

    def _publish(self, events: Sequence[ev.Event]) -> None:
        """All sent, then all acknowledged."""
        for future in [self._producer.send(event) for event in events]:
            future.result()


def requested_attempts(kafka: KafkaSettings, state: AdmissionState) -> set[tuple[str, int]]:
    """Attempts in the prompts topic up to its present end, as far back as one that may still run was admitted."""
    admitted_at = [group.admitted_at for group in state.open_groups.values() if group.running]
    if not admitted_at:
        return set()
    since_ms = max(0, min(admitted_at) - _MARGIN_US) // 1000
    places = offsets_at_time(kafka, topics.PROMPTS, since_ms)
    start = {(topics.PROMPTS.name, partition): offset for partition, offset in places.items()}
    reader = TopicReader(kafka, [topics.PROMPTS], start)
    try:
        return {
            (event.group_id, event.attempt)
            for _, event in read_events(reader.read_to_end(), on_bad=lambda _record, _wrong: None)
            if isinstance(event, ev.GroupRequested) and event.run_id == state.run_id
        }
    finally:
        reader.close()


def feed(settings: Settings, stop: threading.Event) -> None:
    """Until the run ends or `stop` is set. Raises what the infrastructure does not allow."""
    kafka = settings.kafka
    prompts = load_prompts(settings)
    wait_for_broker(kafka, kafka.publish_timeout_s)
    create_topics(kafka)
    producer = AckProducer(kafka, f"{settings.run.run_id}-feeder")
    follower = follow_log(kafka)
    feeder = Feeder(settings, prompts, producer, PayloadStore(settings.payload_url, settings.payload.fsync))
    try:
        while not follower.caught_up() and not stop.is_set():
            fold_arrived(feeder, follower)
        again = feeder.request_missing(requested_attempts(kafka, feeder.state))
        log.info(
            "feeding", prompts=len(prompts), admitted=feeder.state.admitted_groups, requested_again=again
        )
        watches = Watches(settings, SegmentLook(settings), system_clock)
        serve_metrics(settings.metrics.feeder_port, lambda: feeder_numbers(feeder.state, watches))
        while not stop.is_set() and not feeder.state.ended:
            feeder.step()
            feeder.report(watches.look_at(feeder.state))
            for event in fold_arrived(feeder, follower):
                watches.told(event)
        log.info("stopping", admitted=feeder.state.admitted_groups, ended=feeder.state.ended)
    finally:
        follower.close()
        producer.close()


def follow_log(kafka: KafkaSettings) -> EventFollower:
    """All that a feeder knows, from its beginning."""
    return EventFollower(kafka, _FOLLOWED, on_bad=lambda record, wrong: log.warning(
        "undecodable_record", topic=record.topic.name, offset=record.offset, error=wrong
    ))  # fmt: skip


def fold_arrived(feeder: Feeder, follower: EventFollower) -> list[ev.Event | CompletedBrief]:
    """Take in what has come; a complete group's facts are passed over."""
    events = [event for _, event in follower.poll_by(decode_briefly, _POLL_S)]
    for event in events:
        feeder.fold(event)
    return events


def _words(event: ev.GroupFailed | ev.Alarm) -> dict[str, object]:
    if isinstance(event, ev.Alarm):
        return {"name": event.name, "message": event.message}
    return {"group_id": event.group_id, "attempt": event.attempt, "reason": event.reason}


def main(settings: Settings) -> int:
    """0 at the run's end or at SIGTERM; 1 after an infrastructure error, for the supervisor to start it again; 2 for a wrong
    configuration."""
    configure_logging("feeder")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop.set())
    try:
        feed(settings, stop)
    except HoofprintError as error:
        log.error("feeder_failed", error=error)  # noqa: TRY400 — the line is for people, not a traceback
        return 2 if isinstance(error, ConfigError) else 1
    return 0
