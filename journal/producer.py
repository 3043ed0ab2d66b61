"""Acknowledged produce: every record gives a future that resolves to its place in the log, or to why it has none.

Idempotent, acks=all, one poll thread. The two failures mean different things: `PublishFailed`, the record is certainly
not in the log; `PublishTimeout`, nobody knows. Whatever is not known for certain is a time-out. Nothing is dropped
silently: `flush` raises what failed since the last one.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeout
from typing import Any, NamedTuple, cast

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from journal.connection import LOGGER, client_configuration
from schemas.codec import encode
from schemas.errors import PublishFailed, PublishTimeout, TransportError
from schemas.events import Event
from schemas.settings import KafkaSettings
from schemas.topics import TOPIC_OF, Topic, key_of

_POLL_S = 0.1
_GRACE_S = 2.0  # librdkafka looks for timed-out records once a second

# refused before it was sent, or by the broker before it was appended
_NOT_WRITTEN = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.INVALID_REQUIRED_ACKS,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.POLICY_VIOLATION,
        KafkaError.INVALID_RECORD,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 — librdkafka's own codes have this form
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
        KafkaError._PURGE_QUEUE,  # noqa: SLF001
        KafkaError._QUEUE_FULL,  # noqa: SLF001
    }
)


class Position(NamedTuple):
    """Where a record stands."""

    partition: int
    offset: int


Outcome = Position | TransportError
OnOutcome = Callable[[Outcome], None]


class AckProducer:
    """Any thread may call it. One per process is enough."""

    def __init__(self, kafka: KafkaSettings, client_id: str) -> None:
        self._prefix = kafka.topic_prefix
        self._timeout_s = kafka.publish_timeout_s
        self._producer = Producer(_configuration(kafka, client_id), logger=LOGGER)
        self._changed = threading.Condition()
        self._in_flight = 0
        self._failure: TransportError | None = None
        self._inboxes: dict[asyncio.AbstractEventLoop, _Inbox] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"{client_id}-acks", daemon=True)
        self._thread.start()

    def send(
        self, event: Event, *, raw: bytes | None = None, partition: int | None = None
    ) -> Future[Position]:
        """Hand a record over; blocks only while the local queue is full. `raw`: these bytes instead of the encoding."""
        future: Future[Position] = Future()
        value = encode(event) if raw is None else raw
        self._hand_over(
            TOPIC_OF[type(event)], key_of(event), value, None, partition, _into(future), wait=True
        )
        return future

    def send_raw(
        self, topic: Topic, key: bytes | None, value: bytes, headers: Mapping[str, bytes] | None = None
    ) -> Future[Position]:
        """The same for bytes that are no event of this process."""
        future: Future[Position] = Future()
        self._hand_over(topic, key, value, headers, None, _into(future), wait=True)
        return future

    def publish(self, event: Event, timeout_s: float | None = None) -> Position:
        """Send and wait. PublishFailed: certainly not in the log. PublishTimeout: unknown."""
        limit = self._timeout_s + _GRACE_S if timeout_s is None else timeout_s
        try:
            return self.send(event).result(limit)
        except WaitTimeout:
            raise PublishTimeout(
                f"no acknowledgement within {limit} s", topic=TOPIC_OF[type(event)].name
            ) from None

    async def apublish(self, event: Event) -> Position:
        """`publish` for asyncio: acknowledgements that arrive together wake the caller's loop once."""
        loop = asyncio.get_running_loop()
        inbox = self._inboxes.get(loop) or self._inboxes.setdefault(loop, _Inbox(loop))
        future: asyncio.Future[Position] = loop.create_future()
        self._hand_over(
            TOPIC_OF[type(event)],
            key_of(event),
            encode(event),
            None,
            None,
            lambda end: inbox.add(future, end),
            wait=False,
        )
        return await future

    def flush(self, timeout_s: float | None = None) -> None:
        """Return when all records are acknowledged; raise the first failure since the last flush, or PublishTimeout."""
        limit = self._timeout_s + _GRACE_S if timeout_s is None else timeout_s
        self._producer.flush(limit)
        with self._changed:
            left = 0 if self._changed.wait_for(lambda: self._in_flight == 0, 0.1) else self._in_flight
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if left:
            raise PublishTimeout(f"{left} records without acknowledgement after {limit} s", records=left)

    def close(self) -> None:
        """Wait for what is in flight, then end the thread; failures are raised."""
        if self._closed.is_set():
            return
        try:
            self.flush()
        finally:
            self._closed.set()
            self._thread.join(timeout=5.0)

    def _hand_over(
        self, topic: Topic, key: bytes | None, value: bytes, headers: Mapping[str, bytes] | None,
        partition: int | None, on_outcome: OnOutcome, *, wait: bool,
    ) -> None:  # fmt: skip
        if self._closed.is_set():
            on_outcome(PublishFailed("the producer is closed", topic=topic.name))
            return
        arguments: dict[str, Any] = {"key": key, "on_delivery": _report(topic, self._landed, on_outcome)}
        if headers:
            arguments["headers"] = list(headers.items())
        if partition is not None:
            arguments["partition"] = partition
        with self._changed:
            self._in_flight += 1
        problem = self._produce(topic.full_name(self._prefix), value, arguments, wait=wait)
        if problem is not None:
            failure = PublishFailed(f"the record was refused: {problem}", topic=topic.name, reason=problem)
            self._landed(failure)
            on_outcome(failure)

    def _produce(self, name: str, value: bytes, arguments: dict[str, Any], *, wait: bool) -> str | None:
        """None, or why the record was not taken."""
        patience = int(self._timeout_s / _POLL_S) if wait else 0
        while True:
            try:
                self._producer.produce(name, value, **arguments)
            except BufferError:
                if patience <= 0:
                    return "the local queue is full"
                patience -= 1
                with self._changed:
                    self._changed.wait(_POLL_S)
            except KafkaException as refused:
                return str(refused.args[0].str())
            else:
                return None

    def _landed(self, outcome: Outcome) -> None:
        with self._changed:
            self._in_flight -= 1
            if isinstance(outcome, TransportError) and self._failure is None:
                self._failure = outcome
            self._changed.notify_all()

    def _serve(self) -> None:
        while not self._closed.is_set():
            self._producer.poll(_POLL_S)


class _Inbox:
    """Outcomes for one event loop: added in the poll thread, handed out in the loop, one wake-up for many."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: deque[tuple[asyncio.Future[Position], Outcome]] = deque()
        self._woken = False

    def add(self, future: asyncio.Future[Position], outcome: Outcome) -> None:
        self._arrived.append((future, outcome))
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._hand_out)
            except RuntimeError:  # the loop was closed: nobody waits any more
                self._arrived.clear()

    def _hand_out(self) -> None:
        self._woken = False  # before the queue is emptied: what is added from here on wakes the loop again
        while self._arrived:
            future, outcome = self._arrived.popleft()
            if future.done():
                continue  # cancelled
            if isinstance(outcome, TransportError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)


def _into(future: Future[Position]) -> OnOutcome:
    future.set_running_or_notify_cancel()  # a record that was handed over cannot be cancelled

    def resolve(outcome: Outcome) -> None:
        if isinstance(outcome, TransportError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    return resolve


def _report(
    topic: Topic, landed: OnOutcome, on_outcome: OnOutcome
) -> Callable[[KafkaError | None, Message], None]:
    def on_delivery(error: KafkaError | None, message: Message) -> None:
        outcome: Outcome
        if error is None:
            outcome = Position(cast("int", message.partition()), cast("int", message.offset()))
        elif error.code() in _NOT_WRITTEN:
            outcome = PublishFailed(
                f"the record was refused: {error.str()}", topic=topic.name, reason=error.name()
            )
        else:
            outcome = PublishTimeout(
                f"no acknowledgement: {error.str()}", topic=topic.name, reason=error.name()
            )
        on_outcome(outcome)
        landed(outcome)

    return on_delivery


def _configuration(kafka: KafkaSettings, client_id: str) -> dict[str, Any]:
    return {
        **client_configuration(kafka),
        "client.id": client_id,
        "enable.idempotence": True,
        "acks": "all",
        "linger.ms": kafka.linger_ms,
        "message.timeout.ms": max(int(kafka.publish_timeout_s * 1000), int(kafka.linger_ms) + 1),
        "partitioner": "consistent_random",
        "retry.backoff.max.ms": 500,
    }
