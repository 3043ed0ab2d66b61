"""What the log decided elsewhere: published versions with their checkpoints, and closed attempts. Follows control.v1 and
rollout.verdicts.v1 in the background.

The fold itself is pure (`fold`); a thread of the journal reads and hands events to the event loop. Invariant: `ready` is
set only when everything that stood in both topics at the start was folded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Mapping
from pathlib import Path

from journal.event_log import EventFollower
from journal.reader import Record
from proxy.engines import Wanted
from schemas.errors import HoofprintError
from schemas.events import Event, PolicyActivated, PolicyPublished, Verdict
from schemas.index_set import GroupSet
from schemas.settings import KafkaSettings
from schemas.topics import CONTROL, VERDICTS

OnClosed = Callable[[str, int], None]


class ControlView:
    """`published`: checkpoint by label (None: only its outer trainer has it), in the order of publication. `activated`:
    (version, engine). `closed`: groups by attempt, whose sessions get 410, and `kept`: those whose sessions all ended; a whole
    run's take no more room than its gaps."""

    def __init__(self, run_id: str, on_closed: OnClosed) -> None:
        self.published: dict[str, str | None] = {}
        self.activated: set[tuple[str, str]] = set()
        self.closed: dict[int, GroupSet] = {}
        self.kept: dict[int, GroupSet] = {}
        self.ready = False
        self._run_id = run_id
        self._on_closed = on_closed
        self._follower: EventFollower | None = None

    def fold(self, event: Event) -> None:
        """One event; the first publication of a label counts."""
        if event.run_id != self._run_id:
            return
        if isinstance(event, PolicyPublished):
            uri = event.checkpoint_uri
            self.published.setdefault(event.version, checkpoint_path(uri) if uri else None)
        elif isinstance(event, PolicyActivated):
            self.activated.add((event.version, event.engine_id))
        elif isinstance(event, Verdict):
            judged = self.kept if event.outcome == "kept" else self.closed
            judged.setdefault(event.attempt, GroupSet(self._run_id)).add(event.group_id)
            if event.outcome != "kept":
                self._on_closed(event.group_id, event.attempt)

    def newest(self, excluding: Container[str] = ()) -> Wanted | None:
        """The newest version and its checkpoint, but for labels that engines cannot load."""
        for version in reversed(self.published):
            if version not in excluding:
                return version, self.published[version]
        return None

    def is_newer(self, version: str, than: str) -> bool:
        """Whether both are published, and the first one later."""
        order = list(self.published)
        return version in order and than in order and order.index(version) > order.index(than)

    def is_closed(self, group_id: str | None, attempt: int | None) -> bool:
        """Whether the attempt was retried or dropped."""
        return _holds(self.closed, group_id, attempt)

    def is_kept(self, group_id: str | None, attempt: int | None) -> bool:
        """Whether a batch has taken the attempt: all its sessions have ended, and the log may have forgotten them."""
        return _holds(self.kept, group_id, attempt)

    async def start(self, kafka: KafkaSettings, on_failure: Callable[[HoofprintError], None]) -> None:
        """Follow, and return when everything that is there now was folded. TransportError: no log."""
        loop = asyncio.get_running_loop()
        follower = await asyncio.to_thread(EventFollower, kafka, [CONTROL, VERDICTS])
        self._follower = follower

        def hand_over(_record: Record, event: Event) -> None:
            loop.call_soon_threadsafe(self.fold, event)

        def fail(failure: HoofprintError) -> None:
            loop.call_soon_threadsafe(on_failure, failure)

        follower.follow(hand_over, fail)
        while not await asyncio.to_thread(follower.wait_caught_up, 0.5):
            pass
        self.ready = True

    async def stop(self) -> None:
        """End the thread."""
        if self._follower is not None:
            await asyncio.to_thread(self._follower.close)


def _holds(judged: Mapping[int, GroupSet], group_id: str | None, attempt: int | None) -> bool:
    groups = judged.get(attempt) if attempt is not None else None
    return groups is not None and group_id is not None and group_id in groups


def checkpoint_path(uri: str) -> str:
    """What an engine is given for a checkpoint: an absolute path, or a URL of another scheme as it is."""
    path = uri.removeprefix("file://")
    return str(Path(path).absolute()) if "://" not in path else uri
