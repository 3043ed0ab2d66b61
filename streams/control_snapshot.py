"""Snapshots of the control fold: a restart reads the newest one and what comes behind it, not the log from its start.

A snapshot is a cache. One that is missing, damaged, of another layout, of other rules, or not of this log (the record in
front of it is not the one that was folded last) is left alone, and the fold begins at an older one or at offset 0: the
state is the same. It is taken only when every effect of the records in it is acknowledged.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import structlog

from schemas.errors import CorruptPayload
from streams.control_state import ControlState

log = structlog.get_logger()
RULES = 1
"""Raised when the fold of `control.v1` changes what it makes of the same records: older snapshots are left alone then."""
_KEPT = 2


class Snapshots:
    """In one directory; `every`: records between two of them."""

    def __init__(self, directory: Path, run_id: str, every: int = 5_000) -> None:
        self._directory, self._run_id, self.every = directory, run_id, every
        self._newest = 0

    def due(self, state: ControlState) -> bool:
        """Whether enough was folded since the newest one. A record that could not be read is no place for one."""
        return bool(state.last_id) and state.next_offset >= self._newest + self.every

    def save(self, state: ControlState) -> None:
        """Whole or not at all, and older ones go. A directory that does not take it costs time at the next start, no more."""
        path = self._directory / f"control-r{RULES}-{state.next_offset:012d}.snapshot"
        fresh = path.with_suffix(".new")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with fresh.open("wb") as file:
                file.write(state.to_bytes())
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
            for old in self._paths()[_KEPT:]:
                old.unlink()
        except OSError as problem:
            log.warning("no_snapshot", path=str(path), error=str(problem))
        self._newest = state.next_offset

    def load(self, is_at: Callable[[int, str], bool]) -> ControlState:
        """The state of the newest one that fits, else an empty one. `is_at(offset, event_id)`: what the log holds there."""
        for path in self._paths():
            try:
                state = ControlState.from_bytes(path.read_bytes())
            except (OSError, CorruptPayload) as problem:
                log.warning("snapshot_left_alone", path=str(path), error=str(problem))
                continue
            if state.run_id == self._run_id and is_at(state.next_offset - 1, state.last_id):
                self._newest = state.next_offset
                return state
            log.warning("snapshot_left_alone", path=str(path), error="it is not of this log")
        return ControlState(self._run_id)

    def _paths(self) -> list[Path]:
        """Newest first."""
        return sorted(self._directory.glob(f"control-r{RULES}-*.snapshot"), reverse=True)
