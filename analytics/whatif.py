"""What if the settings had been others: the archived control log, folded again under each combination.

What the trainer, the feeder and the engines did stays as recorded (the log cannot know what they would have done), so a
combination tells which of the recorded groups would have been kept, dropped or tried again, and how old they were.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
from pydantic import ValidationError

from analytics.archived_log import Archived, archived_events, run_id_of
from analytics.catalog import connect
from analytics.replay import fold_log
from schemas import events as ev
from schemas.errors import ConfigError
from schemas.settings import Settings

Choices = Mapping[str, Sequence[object]]


class Outcome(msgspec.Struct, frozen=True):
    """Fates under one combination. `gap_*`: versions between a kept group's trajectories and the newest at its emission."""

    choice: dict[str, object]
    kept: int
    dropped: int
    stale: int
    retries: int
    batches: int
    sequences: int
    trainable_tokens: int
    gap_mean: float
    gap_max: int
    open_groups: int


def whatif(run_dir: Path, choices: Choices) -> pa.Table:
    """One row per combination: its settings, then the counts of `Outcome`. Raises ConfigError for unknown settings."""
    connection = connect(run_dir)
    try:
        run_id = run_id_of(connection, run_dir)
        records = list(archived_events(connection, "control", run_id))
    finally:
        connection.close()
    return as_table([outcome_under(records, run_id, choice) for choice in combinations(choices)])


def combinations(choices: Choices) -> list[dict[str, object]]:
    """All combinations, in the order in which the values were given."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def outcome_under(records: Sequence[Archived], run_id: str, choice: Mapping[str, object]) -> Outcome:
    """Fold the log with the run's settings changed by `choice` (`section.key` to value)."""
    changed = [
        record._replace(event=_reconfigured(record.event, choice))
        if isinstance(record.event, ev.RunConfigured)
        else record
        for record in records
    ]
    state, effects = fold_log(changed, run_id)
    verdicts = [effect for effect in effects if isinstance(effect, ev.Verdict)]
    batches = [effect for effect in effects if isinstance(effect, ev.TrainBatch)]
    counts = Counter(verdict.outcome for verdict in verdicts)
    kept = [verdict for verdict in verdicts if verdict.outcome == "kept"]
    return Outcome(
        choice=dict(choice),
        kept=counts["kept"],
        dropped=counts["dropped"],
        stale=sum(verdict.reason == "stale" for verdict in verdicts),
        retries=counts["retry"],
        batches=len(batches),
        sequences=sum(group.sequences for batch in batches for group in batch.groups),
        trainable_tokens=sum(group.trainable_tokens for batch in batches for group in batch.groups),
        gap_mean=sum(verdict.gap_mean for verdict in kept) / len(kept) if kept else 0.0,
        gap_max=max((verdict.gap_max for verdict in kept), default=0),
        open_groups=state.open_groups,
    )


def as_table(outcomes: Sequence[Outcome]) -> pa.Table:
    """Settings first, then the counts."""
    rows = []
    for outcome in outcomes:
        row = msgspec.to_builtins(outcome)
        rows.append({**row.pop("choice"), **row})
    return pa.Table.from_pylist(rows)


def _reconfigured(event: ev.RunConfigured, choice: Mapping[str, object]) -> ev.RunConfigured:
    tree = json.loads(event.settings)
    for path, value in choice.items():
        section, _, key = path.partition(".")
        if key not in tree.get(section, {}):
            raise ConfigError(f"there is no setting {path}", key=path)
        tree[section][key] = value
    try:
        settings = Settings.from_json(json.dumps(tree))
    except ValidationError as wrong:
        first = wrong.errors()[0]
        raise ConfigError(
            f"setting {'.'.join(map(str, first['loc']))}: {first['msg']}", problem=first["msg"]
        ) from wrong
    return msgspec.structs.replace(event, settings=settings.to_json(), settings_digest=settings.digest())
