"""A session from the log: which of its events are valid, and what they add up to. Pure.

In the order of the partition, a claim is valid if its epoch is above the session's current one; later events of a lower
epoch are void; `restart` voids what went before; an event above the current epoch counts as its own claim. The epoch
check comes before the deduplication.
"""

from __future__ import annotations

from collections.abc import Iterable

import orjson

from proxy.routing import Place, chain_of, next_link
from proxy.sessions import Session
from schemas.events import EndFacts, Event, SessionClaimed, SessionEvent, TokenSegment, TrajectoryEnded


class SessionLog:
    """What the log says of one session so far."""

    def __init__(self) -> None:
        self.epoch = 0
        self.born = 0
        """Epoch of the newest restart; 0: of none that was read."""
        self.started = False
        self.segments: dict[int, TokenSegment] = {}
        self.end: EndFacts | None = None
        self._seen: set[str] = set()

    def fold(self, event: Event) -> None:
        """One event of this session, in log order."""
        if not isinstance(event, SessionEvent) or event.epoch < self.epoch:
            return
        if isinstance(event, SessionClaimed):
            if event.epoch > self.epoch and event.restart:
                self.__init__()  # type: ignore[misc]
                self.born = event.epoch
            self.epoch = event.epoch
            return
        self.epoch = event.epoch
        if event.event_id in self._seen:
            return
        self._seen.add(event.event_id)
        self.started = True
        if isinstance(event, TokenSegment):
            self.segments.setdefault(event.segment_index, event)
            self.end = self.end or event.end
        elif isinstance(event, TrajectoryEnded):
            self.end = self.end or event.end


def read_log(events: Iterable[Event]) -> SessionLog:
    """Fold events of one session."""
    log = SessionLog()
    for event in events:
        log.fold(event)
    return log


def restore(session: Session, log: SessionLog) -> None:
    """Give a new session object what the log has; it goes on at the highest valid index + 1."""
    session.started = log.started
    session.born = log.born
    session.end = log.end
    for index in sorted(log.segments):
        segment = log.segments[index]
        place = _place(session, segment)
        chain, messages = _chain(session, segment, place)
        session.record(segment, place, chain, messages)
        session.engine = segment.engine_id


def _place(session: Session, segment: TokenSegment) -> Place:
    parent = session.step(segment.parent_segment_index)
    if parent is None:
        return Place(None, 0, None)
    return Place(parent, parent.end if segment.branch_point is None else segment.branch_point, None)


def _chain(session: Session, segment: TokenSegment, place: Place) -> tuple[bytes, int]:
    """The conversation behind a chat segment: its parent's, the messages it added, and its answer."""
    if segment.request is None or segment.response is None:
        return b"", 0
    request = orjson.loads(segment.request)
    added = request["messages"]
    if place.parent is not None:
        link, count = place.parent.chain, place.parent.messages
    else:
        link, count = chain_of(request.get("tools"), [])[0], 0
        session.known_tools.add(link)
    for message in [*added, orjson.loads(segment.response)]:
        link = next_link(link, message)
    return link, count + len(added) + 1
