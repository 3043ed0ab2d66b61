"""Replay: the log is the truth, so folding it again must give what was decided.

`verify` folds the archived `control.v1` with the controller's own reducer and compares its effects byte for byte with the
recorded verdicts and batches. `replay_into` puts the archived events back into Kafka under a new run id, where live workers
assemble and judge them again; `compare` sets the two runs side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import duckdb
import msgspec

from analytics.archived_log import Archived, archived_events, run_id_of, unique_events
from analytics.catalog import connect
from analytics.replay_compare import Comparison, compare
from analytics.replay_into import ReplayReport, replay_into, replay_settings
from schemas import events as ev
from schemas.codec import encode
from schemas.errors import SchemaError
from streams.control_fold import fold
from streams.control_state import ControlState

__all__ = [
    "Comparison",
    "ReplayReport",
    "TopicCheck",
    "VerifyReport",
    "compare",
    "replay_into",
    "replay_settings",
    "verify",
]


class Difference(msgspec.Struct, frozen=True):
    """The first place at which a recorded topic and the fold part: what stands there on each side (None: nothing)."""

    index: int
    recorded: str | None
    folded: str | None


class TopicCheck(msgspec.Struct, frozen=True):
    """One output topic of the controller: how many effects were recorded, how many the fold gives, where they part."""

    topic: str
    recorded: int
    folded: int
    equal: int
    difference: Difference | None

    @property
    def ok(self) -> bool:
        """Byte for byte the same."""
        return self.difference is None


class VerifyReport(msgspec.Struct, frozen=True):
    """Result of `verify`."""

    run_id: str
    records: int
    state_digest: str
    verdicts: TopicCheck
    batches: TopicCheck

    @property
    def ok(self) -> bool:
        """Both topics are the same."""
        return self.verdicts.ok and self.batches.ok


def verify(run_dir: Path) -> VerifyReport:
    """Fold the archived control log again and compare. Raises ArchiveError without an archive."""
    connection = connect(run_dir)
    try:
        return verify_archive(connection, run_id_of(connection, run_dir))
    finally:
        connection.close()


def verify_archive(connection: duckdb.DuckDBPyConnection, run_id: str) -> VerifyReport:
    """The same on an open connection."""
    records = list(archived_events(connection, "control", run_id))
    state, effects = fold_log(records, run_id)
    verdicts = [effect for effect in effects if isinstance(effect, ev.Verdict)]
    batches = [effect for effect in effects if not isinstance(effect, ev.Verdict)]
    return VerifyReport(
        run_id,
        len(records),
        state.digest(),
        _check("rollout.verdicts.v1", list(unique_events(connection, "verdicts", run_id)), verdicts),
        _check("train.batches.v1", list(unique_events(connection, "batches", run_id)), batches),
    )


def fold_log(records: Iterable[Archived], run_id: str) -> tuple[ControlState, list[ev.Effect]]:
    """All effects of a control log, in order; a record that cannot be folded is left out, as the controller does."""
    state = ControlState(run_id)
    effects: list[ev.Effect] = []
    for record in records:
        try:
            effects += fold(state, record.offset, record.event)
        except SchemaError:
            continue
    return state, effects


def _check(topic: str, recorded: Sequence[Archived], folded: Sequence[ev.Effect]) -> TopicCheck:
    raws = [encode(effect) for effect in folded]
    equal = 0
    for have, want in zip(recorded, raws, strict=False):
        if have.raw != want:
            break
        equal += 1
    difference = None
    if equal < max(len(recorded), len(raws)):
        difference = Difference(
            equal,
            _text(recorded[equal].event) if equal < len(recorded) else None,
            _text(folded[equal]) if equal < len(folded) else None,
        )
    return TopicCheck(topic, len(recorded), len(raws), equal, difference)


def _text(event: ev.Event) -> str:
    return msgspec.json.encode(event).decode()
