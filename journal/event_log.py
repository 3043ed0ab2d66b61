"""Records as events: decoding with a place for what does not decode, and following topics from their beginning.

A follower is how a process learns what others decided (closed attempts, published versions): it folds the topic from
the start and then stays behind it. An undecodable record is counted and reported, never guessed at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from journal.reader import Place, Record, TopicReader
from schemas.codec import decode
from schemas.errors import HoofprintError, SchemaError
from schemas.events import Event
from schemas.settings import KafkaSettings
from schemas.topics import Topic

T = TypeVar("T")
OnBad = Callable[[Record, SchemaError], None]
OnEvent = Callable[[Record, Event], None]


def read_events(records: Iterable[Record], on_bad: OnBad | None = None) -> Iterator[tuple[Record, Event]]:
    """Decode; without `on_bad` the first undecodable record raises its SchemaError."""
    return read_by(decode, records, on_bad)


def read_by(
    read: Callable[[bytes], T], records: Iterable[Record], on_bad: OnBad | None = None
) -> Iterator[tuple[Record, T]]:
    """The same by another reader: of events that are needed in part."""
    for record in records:
        try:
            yield record, read(record.value)
        except SchemaError as wrong:
            if on_bad is None:
                raise
            on_bad(record, wrong)


class EventFollower:
    """Follows topics from the beginning (or `start`): by `poll`, or in a daemon thread by `follow`, not both."""

    def __init__(
        self,
        kafka: KafkaSettings,
        topics: Sequence[Topic],
        start: Mapping[Place, int] | None = None,
        on_bad: OnBad | None = None,
    ) -> None:
        self.bad_records = 0
        self._on_bad = on_bad
        self._reader = TopicReader(kafka, topics, start)
        self._ends_at_start = self._reader.end_offsets()
        self._stop = threading.Event()
        self._caught_up = threading.Event()
        self._thread: threading.Thread | None = None

    def poll(self, timeout_s: float, max_records: int = 500) -> list[tuple[Record, Event]]:
        """Events that have arrived; waits at most `timeout_s` for the first."""
        return self.poll_by(decode, timeout_s, max_records)

    def poll_by(
        self, read: Callable[[bytes], T], timeout_s: float, max_records: int = 500
    ) -> list[tuple[Record, T]]:
        """The same by another reader than `decode`."""
        return list(read_by(read, self._reader.poll(timeout_s, max_records), self._bad))

    def caught_up(self) -> bool:
        """Whether everything was handed out that stood in the topics when the follower was made."""
        if self._thread is not None:
            return self._caught_up.is_set()  # set behind the handler, not behind the poll
        return self._is_past_start()

    def catch_up(self, handler: OnEvent) -> None:
        """Hand over everything that stood in the topics when the follower was made, then return."""
        while not self._is_past_start():
            for record, event in self.poll(0.5):
                handler(record, event)

    def follow(self, handler: OnEvent, on_failure: Callable[[HoofprintError], None]) -> None:
        """Hand every event to `handler` in a daemon thread until `close`. A failure ends the thread and is reported."""

        def run() -> None:
            try:
                while not self._stop.is_set():
                    for record, event in self.poll(0.2):
                        handler(record, event)
                    if self._is_past_start():
                        self._caught_up.set()
            except HoofprintError as failure:
                on_failure(failure)

        self._thread = threading.Thread(target=run, name="follower", daemon=True)
        self._thread.start()

    def wait_caught_up(self, timeout_s: float) -> bool:
        """For `follow`: whether the handler saw everything that was there at the start within this time."""
        return self._caught_up.wait(timeout_s)

    def positions(self) -> dict[Place, int]:
        """The next offset to read of each partition."""
        return self._reader.positions()

    def close(self) -> None:
        """End the thread, if any, and leave."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        self._reader.close()

    def _is_past_start(self) -> bool:
        at = self._reader.positions()
        return all(at[place] >= end for place, end in self._ends_at_start.items())

    def _bad(self, record: Record, wrong: SchemaError) -> None:
        self.bad_records += 1
        if self._on_bad is not None:
            self._on_bad(record, wrong)
