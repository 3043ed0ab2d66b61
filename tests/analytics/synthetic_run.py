"""A whole small run without processes: events by hand, verdicts and batches by the fold, payload files, the archive.

Versions v0, v1, v2; window 2; groups of 2; batches of 2 groups. g0 and g1 are trained in step 1, g2 and the second attempt
of g4 in step 2, g3 (all v0) is stale when v2 is published.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pyarrow as pa
from analytics_events import AT, RUN, admitted, published, segment

from analytics.columns import RawRow, to_table
from analytics.tables import TABLE_OF, TABLES, Archive
from journal.payloads import PayloadStore
from schemas import events as ev
from schemas import ids
from schemas.arrow import (
    EXPERTS_CODEC,
    GROUP_PAYLOAD,
    GROUP_PAYLOAD_CODEC,
    REQUEST_CODEC,
    SEGMENT_COLUMNS,
    SEGMENT_COLUMNS_CODEC,
)
from schemas.codec import encode
from schemas.settings import Settings
from schemas.tokens import ids_of, logprobs_of, pack_ids, pack_logprobs
from schemas.topics import TOPIC_OF
from schemas.versions import distinct_real
from streams.control_fold import fold
from streams.control_state import ControlState

Spans = Sequence[tuple[str, int, int]]


def group_name(index: int) -> str:
    return ids.group_id(RUN, 0, index)


def settings_of(directory: Path) -> Settings:
    return Settings.model_validate(
        {
            "run": {"run_id": RUN, "directory": str(directory)},
            "window": {"keep_versions": 2},
            "group": {"size": 2, "max_retries": 2},
            "batch": {"size": 2},
        }
    )


@dataclass
class SyntheticRun:
    """Events per topic in log order; `write` makes the run's directory."""

    directory: Path
    by_reference: bool = False
    """Token columns, requests and routed experts of every segment in the payload store, as the proxy does with large ones."""
    events: list[ev.Event] = field(default_factory=list)
    segments: dict[tuple[str, int, int], list[ev.TokenSegment]] = field(default_factory=dict)
    inline: dict[str, ev.TokenSegment] = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        return settings_of(self.directory)

    @property
    def run_dir(self) -> Path:
        return self.settings.run_directory

    def add(self, event: ev.Event) -> None:
        self.events.append(event)

    def control(self) -> list[ev.Event]:
        return [event for event in self.events if TABLE_OF[TOPIC_OF[type(event)].name] == "control"]

    def trajectory(
        self,
        group: str,
        sample: int,
        turns: Sequence[Spans],
        *,
        attempt: int = 0,
        status: str = "completed",
        reward: float = 1.0,
    ) -> None:
        """One segment per turn; the end stands in the last one."""
        end = ev.EndFacts(len(turns), status, "done", reward)  # type: ignore[arg-type]
        made = []
        for index, spans in enumerate(turns):
            made.append(
                self._stored(segment(
                    group, sample, index, attempt=attempt, context=(10 + index, 11), spans=spans,
                    output=[100 * sample + 10 * index + place for place in range(spans[-1][2])],
                    parent=index - 1 if index else None, received_at=AT + 1000 * index,
                    end=end if index == len(turns) - 1 else None, preemptions=len(spans) - 1,
                ))
            )  # fmt: skip
        self.segments[group, attempt, sample] = made
        self.events += made

    def _stored(self, made: ev.TokenSegment) -> ev.TokenSegment:
        if not self.by_reference:
            return made
        store, key = PayloadStore(self.settings.payload_url), (RUN, made.group_id or "", made.attempt or 0)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, SEGMENT_COLUMNS) as writer:
            columns = {name: [getattr(made, name)] for name in SEGMENT_COLUMNS.names}
            writer.write_table(pa.table(columns, schema=SEGMENT_COLUMNS))
        self.inline[made.event_id] = made
        request = json.dumps({"of": made.event_id}).encode()
        return msgspec.structs.replace(
            made, context_ids=b"", output_ids=b"", output_logprobs=b"",
            tokens_ref=store.put(*key, sink.getvalue().to_pybytes(), SEGMENT_COLUMNS_CODEC),
            request_ref=store.put(*key, request, REQUEST_CODEC),
            experts=store.put(*key, f"experts of {made.event_id}".encode(), EXPERTS_CODEC),
        )  # fmt: skip

    def complete(self, group: str, attempt: int = 0) -> None:
        """What the assembler does once all trajectories are there."""
        trajectories = [
            [self.inline.get(one.event_id, one) for one in made]
            for (name, number, _), made in sorted(self.segments.items())
            if (name, number) == (group, attempt)
        ]
        rows = [sequence_row(made) for made in trajectories]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, GROUP_PAYLOAD) as writer:
            writer.write_table(pa.Table.from_pylist(rows, GROUP_PAYLOAD))
        store = PayloadStore(self.settings.payload_url)
        payload = store.put(RUN, group, attempt, sink.getvalue().to_pybytes(), GROUP_PAYLOAD_CODEC)
        newest = max(one.occurred_at for made in trajectories for one in made)
        self.add(
            ev.identified(
                ev.GroupCompleted(
                    run_id=RUN, occurred_at=newest, group_id=group, attempt=attempt, payload=payload, sequences=len(rows),
                    trainable_tokens=sum(sum(row["loss_mask"]) for row in rows),
                    trajectories=tuple(facts(made) for made in trajectories),
                )
            )
        )  # fmt: skip

    def fail(self, group: str, attempt: int = 0) -> None:
        self.add(
            ev.identified(
                ev.GroupFailed(
                    run_id=RUN, occurred_at=AT, group_id=group, attempt=attempt, reason="trajectory_failed"
                )
            )
        )

    def request(self, step: int) -> None:
        batch = ids.batch_id(RUN, step)
        self.add(ev.identified(ev.BatchRequested(run_id=RUN, occurred_at=AT, step=step, batch_id=batch)))

    def step(self, step: int, reward: float) -> None:
        self.add(
            ev.identified(
                ev.StepCompleted(
                    run_id=RUN, occurred_at=AT + step * 1_000_000, step=step, batch_id=ids.batch_id(RUN, step), digest=f"d{step}",
                    checkpoint_step=step, metrics={"reward_mean": reward, "step_seconds": 0.5, "lag_mean": 0.5},
                    drift=(ev.LagDrift(0, 10, 0.0, 1e-7, 1e-6), ev.LagDrift(1, 5, 0.01, 0.02, 0.05)),
                )
            )
        )  # fmt: skip

    def feedback(self, group: str, attempt: int, step: int, lag: int, drift: float) -> None:
        for (name, number, sample), made in self.segments.items():
            if (name, number) != (group, attempt):
                continue
            tokens = sum(len(ids_of(self.inline.get(one.event_id, one).output_ids)) for one in made)
            self.add(
                ev.identified(
                    ev.SequenceFeedback(
                        run_id=RUN, occurred_at=AT, batch_id=ids.batch_id(RUN, step), step=step, group_id=group, attempt=attempt,
                        parent_traj_id=made[0].parent_traj_id, sample_index=sample, lineage_id=made[0].lineage_id, version="v1",
                        reward=1.0, advantage=0.0, trainer_logprobs=pack_logprobs([drift - 0.5] * tokens),
                        rollout_logprobs=pack_logprobs([-0.5] * tokens), lag=pack_ids([lag] * tokens), ratio_mean=1.0,
                        clip_fraction=0.0,
                    )
                )
            )  # fmt: skip

    def effects(self) -> list[ev.Effect]:
        state = ControlState(RUN)
        return [
            effect for offset, event in enumerate(self.control()) for effect in fold(state, offset, event)
        ]

    def write(self, effects: Iterable[ev.Effect] | None = None, snapshots: int = 1) -> Path:
        """Archive, settings.json and answers; `effects`: instead of the fold's own."""
        everything = [*self.events, *(self.effects() if effects is None else effects)]
        write_archive(self.run_dir, everything, snapshots)
        (self.run_dir / "settings.json").write_text(self.settings.to_json())
        self.write_answers(
            [self.inline.get(one.event_id, one) for made in self.segments.values() for one in made]
        )
        return self.run_dir

    def write_answers(self, segments: Iterable[ev.TokenSegment]) -> None:
        answers = self.run_dir / "answers"
        answers.mkdir(parents=True, exist_ok=True)
        lines = [
            json.dumps(
                {
                    "parent_traj_id": one.parent_traj_id, "segment_index": one.segment_index, "attempt": one.attempt,
                    "group_id": one.group_id, "kind": "ids", "digest": hashlib.sha256(one.output_ids).hexdigest(),
                }
            )
            for one in segments
        ]  # fmt: skip
        (answers / "worker-0.jsonl").write_text("".join(line + "\n" for line in lines))


def write_archive(run_dir: Path, everything: Iterable[ev.Event], snapshots: int = 1) -> None:
    """Rows at the offsets that one partition per topic would give; a table's rows in several snapshots."""
    rows: dict[str, list[RawRow]] = {name: [] for name in TABLES}
    for event in everything:
        table = rows[TABLE_OF[TOPIC_OF[type(event)].name]]
        table.append(RawRow(0, len(table), AT // 1000, b"key", encode(event), event))
    archive = Archive(run_dir, create=True)
    for name, listed in rows.items():
        cut = len(listed) // snapshots
        for part in (listed[:cut], listed[cut:]):
            if part:
                archive.append(name, to_table(TABLES[name], part), {0: part[-1].kafka_offset + 1})
    archive.close()


def facts(made: Sequence[ev.TokenSegment]) -> ev.TrajectoryFacts:
    end = made[-1].end
    assert end is not None
    versions = tuple(distinct_real(span.version for one in made for span in one.spans))
    return ev.TrajectoryFacts(
        parent_traj_id=made[0].parent_traj_id, sample_index=made[0].sample_index or 0, version=made[-1].spans[-1].version,
        versions=versions, reward=end.reward, status=end.status, reason=end.reason, segments=len(made), sequences=1,
        output_tokens=sum(len(ids_of(one.output_ids)) for one in made),
        context_tokens=sum(len(ids_of(one.context_ids)) for one in made), preemptions=sum(one.preemptions for one in made),
        abandoned_segments=0, tokens_digest=hashlib.sha256(b"".join(one.output_ids for one in made)).hexdigest(),
        started_at=made[0].received_at, ended_at=made[-1].done_at,
    )  # fmt: skip


def sequence_row(made: Sequence[ev.TokenSegment]) -> dict[str, object]:
    versions = distinct_real(span.version for one in made for span in one.spans)
    row: dict[str, list[object]] = {"tokens": [], "loss_mask": [], "logprobs": [], "version_code": []}
    for one in made:
        context, output = ids_of(one.context_ids).tolist(), ids_of(one.output_ids).tolist()
        row["tokens"] += [*context, *output]
        row["loss_mask"] += [0] * len(context) + [1] * len(output)
        row["logprobs"] += [0.0] * len(context) + logprobs_of(one.output_logprobs).tolist()
        row["version_code"] += [-1] * len(context)
        row["version_code"] += [
            versions.index(span.version) for span in one.spans for _ in range(span.start, span.stop)
        ]
    end = made[-1].end
    assert end is not None
    return {
        **row, "parent_traj_id": made[0].parent_traj_id, "sample_index": made[0].sample_index, "lineage_id": made[0].lineage_id,
        "is_anchor": True, "status": end.status, "reward": end.reward, "trajectory_version": made[-1].spans[-1].version,
        "versions": versions, "segment_indices": [one.segment_index for one in made], "experts_uri": [],
    }  # fmt: skip


def small_run(directory: Path, *, by_reference: bool = False) -> SyntheticRun:
    """The run that the module's docstring tells."""
    run = SyntheticRun(directory, by_reference)
    text = run.settings.to_json()
    run.add(
        ev.identified(
            ev.RunConfigured(
                run_id=RUN,
                occurred_at=AT,
                settings=text,
                settings_digest=run.settings.digest(),
                software="test",
            )
        )
    )
    run.add(published("v0", 0))
    for index in range(4):
        run.add(admitted(group_name(index), index=index))
    run.request(1)
    for index, rewards in enumerate([(0.0, 1.0), (1.0, 1.0)]):
        _group(run, group_name(index), [[("v0", 0, 3)], [("v0", 0, 2)]], rewards)
    run.feedback(group_name(0), 0, 1, lag=0, drift=0.0)
    run.feedback(group_name(1), 0, 1, lag=0, drift=0.0)
    run.step(1, 0.75)
    run.add(published("v1", 1))
    run.add(admitted(group_name(4), index=4))
    _group(run, group_name(2), [[("v0", 0, 2), ("v1", 2, 4)]], (0.0, 0.0))
    _group(run, group_name(3), [[("v0", 0, 2)]], (1.0, 0.0))
    run.trajectory(group_name(4), 0, [[("v1", 0, 2)]], status="failed")
    run.fail(group_name(4))
    run.add(published("v2", 2))
    run.add(admitted(group_name(4), attempt=1, index=4))
    _group(run, group_name(4), [[("v2", 0, 2)]], (1.0, 1.0), attempt=1)
    run.request(2)
    run.feedback(group_name(2), 0, 2, lag=1, drift=0.25)
    run.feedback(group_name(4), 1, 2, lag=0, drift=0.0)
    run.step(2, 0.5)
    run.add(ev.identified(ev.DatasetEnded(run_id=RUN, occurred_at=AT, groups=5)))
    run.add(ev.identified(ev.RunEnded(run_id=RUN, occurred_at=AT + 9_000_000, reason="done")))
    return run


def _group(
    run: SyntheticRun, group: str, turns: Sequence[Spans], rewards: Sequence[float], attempt: int = 0
) -> None:
    for sample, reward in enumerate(rewards):
        run.trajectory(group, sample, turns, attempt=attempt, reward=reward)
    run.complete(group, attempt)


def replaced(events: list[ev.Effect], index: int, **changes: object) -> list[ev.Effect]:
    return [
        msgspec.structs.replace(event, **changes) if place == index else event
        for place, event in enumerate(events)
    ]
