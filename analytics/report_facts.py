"""The numbers of a report, asked of the archive. Nothing is drawn here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import msgspec

from analytics.archived_log import run_id_of
from analytics.catalog import connect, query_text
from analytics.sql import execute
from analytics.tables import archive_directory


class StepRow(msgspec.Struct, frozen=True):
    """One completed optimizer step (of the branch that survived)."""

    step: int
    reward_mean: float | None
    lag_mean: float | None
    seconds: float | None


class FateRow(msgspec.Struct, frozen=True):
    """Verdicts of one kind: kept, dropped or retry, and why."""

    outcome: str
    reason: str
    verdicts: int
    gap_mean: float | None


class LagRow(msgspec.Struct, frozen=True):
    """Trained tokens of one lag, and how far trainer and rollout log-probs are apart (nats)."""

    lag: int
    tokens: int
    mean: float
    mean_abs: float
    p99_abs: float
    max_abs: float


class SpanRow(msgspec.Struct, frozen=True):
    """Training trajectories whose tokens came from so many versions."""

    version_span: int
    trajectories: int


class Totals(msgspec.Struct, frozen=True):
    """Counts of the whole run. `seconds`: from the first admission to the last event of `control.v1`."""

    seconds: float
    steps: int
    versions: int
    groups: int
    trajectories: int
    output_tokens: int
    trained_tokens: int
    preempted: int
    resumed: int
    weight_updates: int
    pause_ms_mean: float | None

    @property
    def tokens_per_s(self) -> float:
        """Output tokens that the log has, per second."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def trajectories_per_min(self) -> float:
        """Trajectories of all kinds."""
        return 60 * self.trajectories / self.seconds if self.seconds else 0.0

    @property
    def steps_per_min(self) -> float:
        """Optimizer steps."""
        return 60 * self.steps / self.seconds if self.seconds else 0.0


class Report(msgspec.Struct, frozen=True):
    """Everything that is shown."""

    run_id: str
    archive: str
    html: str
    steps: tuple[StepRow, ...]
    fates: tuple[FateRow, ...]
    lags: tuple[LagRow, ...]
    spans: tuple[SpanRow, ...]
    totals: Totals

    def reward_of(self, steps: slice) -> float | None:
        """Mean reward over some of the steps; None without any."""
        rewards = [row.reward_mean for row in self.steps if row.reward_mean is not None][steps]
        return sum(rewards) / len(rewards) if rewards else None


STEPS = """
SELECT step, metrics['reward_mean'] AS reward_mean, metrics['lag_mean'] AS lag_mean, metrics['step_seconds'] AS seconds
FROM step_completed QUALIFY row_number() OVER (PARTITION BY step ORDER BY kafka_offset DESC) = 1 ORDER BY step
"""
FATES = """
SELECT outcome, reason, count(*) AS verdicts, avg(gap_mean) AS gap_mean FROM verdicts
GROUP BY outcome, reason ORDER BY (outcome = 'kept') DESC, outcome, verdicts DESC
"""
TOTALS = """
SELECT coalesce(date_diff('millisecond', (SELECT min(occurred_at) FROM group_admitted),
                          (SELECT max(occurred_at) FROM log_control)) / 1000, 0)::DOUBLE AS seconds,
       (SELECT count(DISTINCT step) FROM step_completed) AS steps, (SELECT count(*) FROM versions) AS versions,
       (SELECT count(*) FROM groups) AS groups, (SELECT count(*) FROM trajectories) AS trajectories,
       (SELECT coalesce(sum(len(output_ids)), 0) FROM live_segments)::BIGINT AS output_tokens,
       (SELECT coalesce(sum(len(trainer_logprobs)), 0) FROM sequence_feedback)::BIGINT AS trained_tokens,
       (SELECT coalesce(sum(preempted), 0) FROM policy_activated)::BIGINT AS preempted,
       (SELECT coalesce(sum(preemptions), 0) FROM live_segments)::BIGINT AS resumed,
       (SELECT count(*) FROM policy_activated) AS weight_updates,
       (SELECT avg(pause_ms) FROM policy_activated) AS pause_ms_mean
"""


def build_report(run_dir: Path) -> Report:
    """Ask the archive. Raises ArchiveError without one."""
    connection = connect(run_dir)
    try:
        return Report(
            run_id=run_id_of(connection, run_dir),
            archive=str(archive_directory(run_dir)),
            html=str(html_path(run_dir)),
            steps=tuple(msgspec.convert(row, StepRow) for row in _rows(connection, STEPS)),
            fates=tuple(msgspec.convert(row, FateRow) for row in _rows(connection, FATES)),
            lags=tuple(msgspec.convert(row, LagRow) for row in _rows(connection, query_text("drift_by_lag"))),
            spans=tuple(
                msgspec.convert(row, SpanRow) for row in _rows(connection, query_text("version_spans"))
            ),
            totals=msgspec.convert(_rows(connection, TOTALS)[0], Totals),
        )
    finally:
        connection.close()


def _rows(connection: duckdb.DuckDBPyConnection, query: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = execute(connection, query).to_pylist()
    return rows


def html_path(run_dir: Path) -> Path:
    """Where the page of a run lies."""
    return run_dir.absolute() / "report" / "report.html"
