"""The laws of the design, checked on a run's archive by other means than the code that had to keep them.

Each check counts what it looked at and names what offends. `check_run` runs them all. Folding the control log again is a
check of its own (`analytics.replay.verify`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import duckdb
import msgspec

from analytics.archived_log import (
    Archived,
    archived_events,
    completed_groups,
    of_type,
    recorded_settings,
    run_id_of,
    unique_events,
)
from analytics.archived_payloads import ArchivedPayloads
from analytics.catalog import connect
from analytics.tables import TABLES
from analytics.token_invariants import (
    answers_are_archived,
    live_segments,
    payloads_hold_the_segments,
    segments_make_the_groups,
)
from analytics.version_order import VersionOrder
from schemas import events as ev
from schemas.versions import real_version

SHOWN = 5
OffsetCount = tuple[str, int, int, int, int]


class Check(msgspec.Struct, frozen=True):
    """One law: how many things it was asked of, and which of them offend."""

    name: str
    checked: int
    offending: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Nothing offends. A law that was asked of nothing holds."""
        return not self.offending

    @property
    def detail(self) -> str:
        """For people."""
        if self.ok:
            return f"{self.checked} checked"
        shown = "; ".join(self.offending[:SHOWN])
        return f"{len(self.offending)} of {self.checked} offend: {shown}{'; …' if len(self.offending) > SHOWN else ''}"


def check_run(run_dir: Path) -> list[Check]:
    """All laws but the replay. Raises ArchiveError without an archive."""
    connection = connect(run_dir)
    try:
        run_id = run_id_of(connection, run_dir)
        settings = recorded_settings(connection, run_id)
        payloads = ArchivedPayloads(run_dir, settings)
        control = list(unique_events(connection, "control", run_id))
        verdicts = of_type(unique_events(connection, "verdicts", run_id), ev.Verdict)
        batches = of_type(unique_events(connection, "batches", run_id), ev.TrainBatch)
        emitted = of_type(archived_events(connection, "batches", run_id), ev.TrainBatch)
        completed = completed_groups(connection, run_id)
        window = settings.window
        live = live_segments(connection, payloads)
        return [
            _check("archive_has_every_offset", offset_gaps(offset_counts(connection))),
            _check("one_terminal_verdict_per_group", terminal_verdicts(control, verdicts)),
            _check(
                "batches_inside_the_window",
                batches_inside_window(
                    control, verdicts, batches, VersionOrder(window.keep_versions, window.order)
                ),
            ),
            _check("answers_are_archived", answers_are_archived(connection, run_dir, payloads)),
            _check("segments_make_the_groups", segments_make_the_groups(live, completed.values())),
            _check(
                "payloads_hold_the_segments",
                payloads_hold_the_segments(live, payloads, completed.values()),
            ),
            _check("batches_hold_the_groups", batches_hold_the_groups(completed, verdicts, batches)),
            _check("no_batch_contributes_twice", contributes_once(control, emitted)),
        ]
    finally:
        connection.close()


def _check(name: str, findings: Iterable[str | None]) -> Check:
    """A check yields None for each thing that is right, and a sentence for each that is not."""
    listed = list(findings)
    return Check(name, len(listed), tuple(finding for finding in listed if finding is not None))


def offset_counts(connection: duckdb.DuckDBPyConnection) -> list[OffsetCount]:
    """Per table and partition: number of records, of distinct offsets, last offset."""
    found: list[OffsetCount] = []
    for name in TABLES:
        rows = connection.execute(
            f"""SELECT "partition", count(*), count(DISTINCT kafka_offset), max(kafka_offset) FROM log_{name}
            GROUP BY ALL ORDER BY ALL"""  # noqa: S608 — names of ours
        ).fetchall()
        found += [(name, partition, count, distinct, last) for partition, count, distinct, last in rows]
    return found


def offset_gaps(rows: Iterable[OffsetCount]) -> Iterator[str | None]:
    """No record is missing below the last one, none is there twice."""
    for table, partition, count, distinct, last in rows:
        whole = count == distinct == last + 1
        yield None if whole else f"{table}/{partition} has {count} records, {distinct} offsets up to {last}"


def terminal_verdicts(control: Sequence[Archived], verdicts: Sequence[ev.Verdict]) -> Iterator[str | None]:
    """Every admitted group has exactly one terminal verdict, and nobody else has one."""
    ends = Counter(verdict.group_id for verdict in verdicts if verdict.outcome != "retry")
    admitted = {
        r.event.group_id for r in control if isinstance(r.event, ev.GroupAdmitted) and r.event.kind == "train"
    }
    for group in sorted(admitted | set(ends)):
        if group not in admitted:
            yield f"{group} has a verdict and was never admitted"
        else:
            yield None if ends[group] == 1 else f"{group} has {ends[group]} terminal verdicts"


def batches_inside_window(
    control: Sequence[Archived],
    verdicts: Sequence[ev.Verdict],
    batches: Sequence[ev.TrainBatch],
    order: VersionOrder,
) -> Iterator[str | None]:
    """The window of each batch, derived again from the log up to its cause, holds all its trajectories' versions."""
    judged_at = {(verdict.group_id, verdict.attempt): verdict.cause_offset for verdict in verdicts}
    caused = defaultdict(list)
    for batch in batches:
        caused[batch.cause_offset].append(batch)
    trajectories: dict[tuple[str, int], tuple[ev.TrajectoryFacts, ...]] = {}
    admitted: set[tuple[str, int]] = set()
    for offset, _, event in control:
        if isinstance(event, ev.PolicyPublished):
            order.publish(event.version, offset)
        elif isinstance(event, ev.GroupAdmitted):
            admitted.add((event.group_id, event.attempt))
        elif isinstance(event, ev.GroupCompleted | ev.GroupFailed):
            key = (event.group_id, event.attempt)
            if key in admitted and key not in trajectories and judged_at.get(key, offset) >= offset:
                order.observe((t.version for t in event.trajectories if t.parent_traj_id), offset)
                trajectories[key] = event.trajectories
        for batch in caused.pop(offset, ()):
            yield _outside(batch, order, trajectories)
    yield from (
        f"batch of step {batch.step} names no cause in the log" for rest in caused.values() for batch in rest
    )


def _outside(
    batch: ev.TrainBatch,
    order: VersionOrder,
    trajectories: dict[tuple[str, int], tuple[ev.TrajectoryFacts, ...]],
) -> str | None:
    live, current = order.live(), order.current()
    if (batch.window, batch.current_version) != (live if order.keep_versions else (), current):
        return f"batch of step {batch.step} has window {batch.window} at {batch.current_version}, the log {live} at {current}"
    for group in batch.groups:
        for facts in trajectories.get((group.group_id, group.attempt), ()):
            version = real_version(facts.version)
            if version is not None and version not in live:
                return f"batch of step {batch.step}: {group.group_id} has a trajectory of {version}, the window is {live}"
    return None


def batches_hold_the_groups(
    completed: dict[tuple[str, int], ev.GroupCompleted],
    verdicts: Sequence[ev.Verdict],
    batches: Sequence[ev.TrainBatch],
) -> Iterator[str | None]:
    """Manifest rows equal the completions they name, and `kept` verdicts name exactly the rows of the batches."""
    kept = {(v.group_id, v.attempt): v.batch_id for v in verdicts if v.outcome == "kept"}
    for batch in batches:
        for group in batch.groups:
            key = (group.group_id, group.attempt)
            done = completed.get(key)
            same = done is not None and (group.payload, group.sequences, group.trainable_tokens) == (
                done.payload, done.sequences, done.trainable_tokens,
            )  # fmt: skip
            if not same:
                yield f"step {batch.step}: {group.group_id} attempt {group.attempt} is not what was completed"
            elif kept.pop(key, None) != batch.batch_id:
                yield f"step {batch.step}: {group.group_id} attempt {group.attempt} has no kept verdict of this batch"
            else:
                yield None
    yield from (f"{group} attempt {attempt} is kept and in no batch" for group, attempt in kept)


def contributes_once(control: Sequence[Archived], emitted: Sequence[ev.TrainBatch]) -> Iterator[str | None]:
    """In the history of the surviving weights every step and every batch stands once; no attempt is in two batches."""
    by_id: dict[str, ev.TrainBatch] = {}
    for batch in emitted:
        if by_id.setdefault(batch.batch_id, batch) != batch:
            yield f"batch {batch.batch_id} was emitted with two contents"
    holders = Counter((group.group_id, group.attempt) for batch in by_id.values() for group in batch.groups)
    yield from (
        None if count == 1 else f"{group} attempt {attempt} is in {count} batches"
        for (group, attempt), count in holders.items()
    )
    steps: list[ev.StepCompleted] = []
    for _, _, event in control:
        if isinstance(event, ev.RolledBack):
            steps = [step for step in steps if step.step <= event.to_step]
        elif isinstance(event, ev.StepCompleted):
            steps.append(event)
    times, uses = Counter(step.step for step in steps), Counter(step.batch_id for step in steps)
    for step in steps:
        if times[step.step] > 1 or uses[step.batch_id] > 1:
            yield f"step {step.step} or its batch {step.batch_id} was trained twice"
        else:
            yield (
                None
                if step.batch_id in by_id
                else f"step {step.step} trained on batch {step.batch_id}, which was never emitted"
            )
