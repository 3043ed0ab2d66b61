"""Acknowledged produce: every record has an outcome, its place in the log or why it has none.

Idempotent, acks=all, one poll thread. Who asks for a future pays for it: `post` tells a function, or `flush` alone. The
two failures mean different things: `PublishFailed`, the record is certainly not in the log; `PublishTimeout`, nobody knows.
Whatever is not known for certain is a time-out. Nothing is dropped silently: `flush` raises what failed since the last one.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeout
from functools import partial
from typing import Any, NamedTuple, cast

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from journal.connection import LOGGER, client_configuration
from schemas.codec import encode
from schemas.errors import PublishFailed, PublishTimeout, TransportError
from schemas.events import Event
from schemas.settings import KafkaSettings
from schemas.topics import MAX_RECORD_BYTES, TOPIC_OF, Topic, key_of

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

    def __init__(self, kafka: KafkaSettings, client_id: str, linger_ms: float | None = None) -> None:
        """`linger_ms`: instead of the settings', for a process whose callers wait for each record."""
        self._prefix = kafka.topic_prefix
        self._timeout_s = kafka.publish_timeout_s
        self._producer = Producer(
            _configuration(kafka, client_id, kafka.linger_ms if linger_ms is None else linger_ms),
            logger=LOGGER,
        )
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0  # threads that want to be told of a change
        self._in_flight = 0
        self._failure: TransportError | None = None
        self._names: dict[type[Event], tuple[Topic, str]] = {}
        self._inboxes: dict[asyncio.AbstractEventLoop, _Inbox] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"{client_id}-acks", daemon=True)
        self._thread.start()

    def send(
        self, event: Event, *, raw: bytes | None = None, partition: int | None = None
    ) -> Future[Position]:
        """Hand a record over; blocks only while the local queue is full. `raw`: these bytes instead of the encoding."""
        future: Future[Position] = Future()
        topic, name = self._place(event)
        value = encode(event) if raw is None else raw
        self._hand_over(topic, name, key_of(event), value, _into(future), partition=partition)
        return future

    def post(self, event: Event, on_outcome: OnOutcome | None = None) -> None:
        """The same without a future: `on_outcome` is called in a thread of the client, and must be quick; `flush` tells
        of failures in any case."""
        topic, name = self._place(event)
        self._hand_over(topic, name, key_of(event), encode(event), on_outcome)

    def send_raw(
        self, topic: Topic, key: bytes | None, value: bytes, headers: Mapping[str, bytes] | None = None
    ) -> Future[Position]:
        """The same for bytes that are no event of this process."""
        future: Future[Position] = Future()
        self._hand_over(topic, topic.full_name(self._prefix), key, value, _into(future), headers)
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
        topic, name = self._place(event)
        self._hand_over(topic, name, key_of(event), encode(event), partial(inbox.add, future), wait=False)
        return await future

    def flush(self, timeout_s: float | None = None) -> None:
        """Return when all records are acknowledged; raise the first failure since the last flush, or PublishTimeout."""
        limit = self._timeout_s + _GRACE_S if timeout_s is None else timeout_s
        self._producer.flush(limit)
        self._wake()
        with self._changed:
            self._waiting += 1
            left = 0 if self._changed.wait_for(lambda: self._in_flight == 0, 0.1) else self._in_flight
            self._waiting -= 1
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

    def _place(self, event: Event) -> tuple[Topic, str]:
        """Topic of an event, and its name at the broker."""
        place = self._names.get(type(event))
        if place is None:
            topic = TOPIC_OF[type(event)]
            place = self._names[type(event)] = topic, topic.full_name(self._prefix)
        return place

    def _hand_over(
        self, topic: Topic, name: str, key: bytes | None, value: bytes, on_outcome: OnOutcome | None,
        headers: Mapping[str, bytes] | None = None, partition: int | None = None, *, wait: bool = True,
    ) -> None:  # fmt: skip
        if self._closed.is_set():
            self._refuse(PublishFailed("the producer is closed", topic=topic.name), on_outcome)
            return
        arguments: dict[str, Any] = {
            "key": key,
            "on_delivery": partial(self._delivered, topic, on_outcome),
        }
        if headers:
            arguments["headers"] = list(headers.items())
        if partition is not None:
            arguments["partition"] = partition
        with self._lock:
            self._in_flight += 1
        problem = self._produce(name, value, arguments, wait=wait)
        if problem is not None:
            failure = PublishFailed(f"the record was refused: {problem}", topic=topic.name, reason=problem)
            self._landed(failure)
            self._refuse(failure, on_outcome)

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
                    self._waiting += 1
                    self._changed.wait(_POLL_S)
                    self._waiting -= 1
            except KafkaException as refused:
                return str(refused.args[0].str())
            else:
                return None

    def _refuse(self, failure: TransportError, on_outcome: OnOutcome | None) -> None:
        if on_outcome is not None:
            on_outcome(failure)
            self._wake()

    def _delivered(
        self, topic: Topic, on_outcome: OnOutcome | None, error: KafkaError | None, message: Message
    ) -> None:
        """In the thread that polls or flushes, once per record."""
        failure = None if error is None else _failure(topic, error)
        if on_outcome is not None:
            place = cast("tuple[int, int]", (message.partition(), message.offset()))
            on_outcome(failure or Position(*place))
        self._landed(failure)

    def _landed(self, failure: TransportError | None) -> None:
        with self._lock:
            self._in_flight -= 1
            if failure is not None and self._failure is None:
                self._failure = failure
            if self._waiting:
                self._changed.notify_all()

    def _serve(self) -> None:
        while not self._closed.is_set():
            self._producer.poll(_POLL_S)
            self._wake()

    def _wake(self) -> None:
        """Behind a round of acknowledgements, not with the first of them: its loop would fight the rest for the interpreter."""
        for inbox in tuple(self._inboxes.values()):
            inbox.wake()


class _Inbox:
    """Outcomes for one event loop: added in the poll thread, handed out in the loop, one wake-up for many."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: deque[tuple[asyncio.Future[Position], Outcome]] = deque()
        self._woken = False

    def add(self, future: asyncio.Future[Position], outcome: Outcome) -> None:
        self._arrived.append((future, outcome))

    def wake(self) -> None:
        if self._arrived and not self._woken:
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


def _failure(topic: Topic, error: KafkaError) -> TransportError:
    if error.code() in _NOT_WRITTEN:
        return PublishFailed(f"the record was refused: {error.str()}", topic=topic.name, reason=error.name())
    return PublishTimeout(f"no acknowledgement: {error.str()}", topic=topic.name, reason=error.name())


def _configuration(kafka: KafkaSettings, client_id: str, linger_ms: float) -> dict[str, Any]:
    return {
        **client_configuration(kafka),
        "client.id": client_id,
        "enable.idempotence": True,
        "acks": "all",
        "message.max.bytes": MAX_RECORD_BYTES,
        "linger.ms": linger_ms,
        "message.timeout.ms": max(int(kafka.publish_timeout_s * 1000), int(linger_ms) + 1),
        "partitioner": "consistent_random",
        "retry.backoff.max.ms": 500,
    }
