"""What a controller's start costs on a log of 50,000 groups: read, decode, fold; from the start and from its newest snapshot;
and how the fold's state grows with the length of a run.

Figures are process CPU, medians of several rounds: other processes share the cores. Their reference is the same work's plain
reading of the log, which no design can avoid without a snapshot. A start's wall-clock time is shorter than its CPU time,
because the client fetches in threads of its own.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import fold_feeder
from benchmarks.figures import Figure, publish
from journal.producer import AckProducer
from journal.reader import Record
from journal.topic_admin import create_topics
from schemas import events as ev
from schemas import ids, topics
from schemas.codec import decode
from schemas.completed_brief import CompletedBrief, decode_briefly
from schemas.events import Event, identified
from schemas.settings import KafkaSettings, load
from streams.control_fold import fold
from streams.control_output import Written, holds, records_until
from streams.control_snapshot import Snapshots
from streams.control_state import ControlState
from streams.control_worker import ControllerWorker
from streams.feeder_dataset import prompt_digest, prompt_text

RUN = "bench"
GROUPS = 50_000
SIZE = 8
BATCH = 32
LONGER = 10
ROUNDS = 5
WALL = "start without a snapshot, wall clock"
_OUTPUTS = (topics.VERDICTS, topics.BATCHES)


def events(groups: int) -> Iterator[Event]:
    """`control.v1` of a run: groups of 8 are admitted and complete, every 32 of them are a step with a version of its own."""
    settings = load(sets=(f"run.run_id={RUN}", f"batch.size={BATCH}", "feeder.max_outstanding_groups=64"))
    yield identified(
        ev.RunConfigured(
            run_id=RUN,
            occurred_at=1,
            settings=settings.to_json(),
            settings_digest=settings.digest(),
            software="0",
        )
    )
    yield from _step(0)
    version = "v000000"
    for index in range(groups):
        group = ids.group_id(RUN, 0, index)
        yield identified(
            ev.GroupAdmitted(
                run_id=RUN, occurred_at=2, group_id=group, attempt=0, group_size=SIZE, prompt_index=index, dataset_epoch=0,
                prompt_digest=prompt_digest(prompt_text(prompt_of(index))),
            )
        )  # fmt: skip
        yield _completed(group, version)
        if index % BATCH == BATCH - 1:
            step = index // BATCH + 1
            version = f"v{step:06d}"
            yield from _step(step)


def prompt_of(index: int) -> dict[str, Any]:
    """Of the dataset."""
    return {"prompt": index}


def _step(step: int) -> Iterator[Event]:
    yield identified(ev.PolicyPublished(run_id=RUN, occurred_at=3, version=f"v{step:06d}", step=step))
    batch = ids.batch_id(RUN, step + 1)
    yield identified(ev.BatchRequested(run_id=RUN, occurred_at=4, step=step + 1, batch_id=batch))


def _completed(group: str, version: str) -> ev.GroupCompleted:
    facts = tuple(
        ev.TrajectoryFacts(
            parent_traj_id=ids.stable_id(group, sample), sample_index=sample, version=version, versions=(version,),
            reward=sample / SIZE, status="completed", reason="done", segments=1, sequences=1, output_tokens=1900,
            context_tokens=148, preemptions=0, abandoned_segments=0, tokens_digest="0123456789abcdef" * 4,
            started_at=1_800_000_000_000_000, ended_at=1_800_000_030_000_000,
        )
        for sample in range(SIZE)
    )  # fmt: skip
    payload = ev.PayloadRef(f"{RUN}/{group}/0/{'0' * 64}", "0" * 64, 180_000, "group-arrow-v1")
    return identified(
        ev.GroupCompleted(
            run_id=RUN, occurred_at=5, group_id=group, attempt=0, payload=payload, sequences=SIZE, trainable_tokens=15_200,
            trajectories=facts,
        )
    )  # fmt: skip


def cpu(work: Callable[[], object]) -> float:
    """Process CPU seconds."""
    began = time.process_time()
    work()
    return time.process_time() - began


def all_written(last: int) -> dict[str, Written]:
    """The output topics of a controller that wrote everything up to this cause."""
    return {topic.name: Written(topic, last_cause=last) for topic in _OUTPUTS}


def skimmed(kafka: KafkaSettings, end: int, snapshots: Snapshots | None) -> ControlState:
    """What the controller does at its start, but for looking at the ends of its output topics."""
    state = None if snapshots is None else snapshots.load(lambda offset, event: holds(kafka, offset, event))
    worker = ControllerWorker(RUN, all_written(end), set(), state)
    for record in records_until(kafka, worker.state.next_offset, end):
        worker.skim(record.offset, record.key, record.value)
    return worker.state


def measure(kafka: KafkaSettings, scratch: Path) -> tuple[dict[str, float], int]:
    """Seconds per layer, and the number of records."""
    create_topics(kafka, [topics.CONTROL])
    producer = AckProducer(kafka, "bench")
    for event in events(GROUPS):
        producer.post(event)
    producer.close()
    records = list(records_until(kafka, 0, 10**9))
    end = len(records)
    whole, snapshots = prepared(records, scratch)
    raw = [record.value for record in records]
    del records
    rounds = [one_round(kafka, raw, snapshots, scratch) for _ in range(ROUNDS)]
    seconds = {name: statistics.median(took[name] for took in rounds) for name in rounds[0]}
    seconds["start of the feeder"] = feeder_seconds(kafka, raw, scratch)
    states = [skimmed(kafka, end, None), skimmed(kafka, end, snapshots)]
    if {state.digest() for state in states} != {whole}:
        raise SystemExit("a start gives another state than the fold of the whole log")
    return seconds, end


def feeder_seconds(kafka: KafkaSettings, raw: list[bytes], scratch: Path) -> float:
    """Of a feeder that has admitted them all."""
    settings = load(sets=(f"run.run_id={RUN}", f"kafka.bootstrap_servers={kafka.bootstrap_servers}"))
    fold_feeder.write_effects(kafka, raw, RUN)
    prompts = [prompt_of(index) for index in range(GROUPS)]
    return statistics.median(fold_feeder.start_s(settings, prompts, scratch) for _ in range(ROUNDS))


def prepared(records: list[Record], scratch: Path) -> tuple[str, Snapshots]:
    """Digest of the whole log's state, and the worst place for a snapshot: the next one is just not due."""
    snapshots = Snapshots(scratch / "worst", RUN)
    state = ControlState(RUN)
    for record in records:
        if record.offset == len(records) - snapshots.every + 1:
            snapshots.save(state)
        fold(state, record.offset, decode(record.value), quiet=True)
    return state.digest(), snapshots


def one_round(
    kafka: KafkaSettings, raw: list[bytes], snapshots: Snapshots, scratch: Path
) -> dict[str, float]:
    """Everything once. What is decoded is let go of at once, as a start does it, but for the fold, which is measured apart."""
    end = len(raw)
    seconds = {
        "read": cpu(lambda: deque(records_until(kafka, 0, end), maxlen=0)),
        "decode": cpu(lambda: deque(map(decode, raw), maxlen=0)),
        "decode briefly": cpu(lambda: deque(map(decode_briefly, raw), maxlen=0)),
    }
    seconds |= fold_seconds(list(map(decode_briefly, raw)))
    began = time.perf_counter()
    seconds["start without a snapshot"] = cpu(lambda: skimmed(kafka, end, None))
    seconds[WALL] = time.perf_counter() - began
    state = skimmed(kafka, end, snapshots)
    seconds["one snapshot"] = cpu(lambda: Snapshots(scratch / "other", RUN).save(state))
    seconds["start from a snapshot"] = cpu(lambda: skimmed(kafka, end, snapshots))
    return seconds


def fold_seconds(log: list[Event | CompletedBrief]) -> dict[str, float]:
    """Of the fold alone."""
    return {
        "fold": cpu(lambda: fold_all(log, quiet=True)),
        "fold with effects": cpu(lambda: fold_all(log, quiet=False)),
    }


def fold_all(log: Sequence[Event | CompletedBrief], *, quiet: bool) -> ControlState:
    """The state behind a log."""
    state = ControlState(RUN)
    for offset, event in enumerate(log):
        fold(state, offset, event, quiet=quiet)
    return state


def grown(groups: int) -> tuple[float, float]:
    """In a process of its own: MiB resident and KiB of a snapshot behind so many groups."""
    command = [sys.executable, "-m", "benchmarks.fold", str(groups)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(out[0]), float(out[1])


def _print_grown(groups: int) -> None:
    state = ControlState(RUN)
    for offset, event in enumerate(events(groups)):
        fold(state, offset, event, quiet=True)
    pages = int(
        Path("/proc/self/statm").read_text().split()[1]
    )  # the peak would be that of the process that started this one
    print(pages * resource.getpagesize() / 2**20, len(state.to_bytes()) / 1024)


def main() -> None:
    """All figures."""
    from stack.broker.embedded import EmbeddedKafka

    with tempfile.TemporaryDirectory() as scratch, EmbeddedKafka() as broker:
        kafka = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
        seconds, records = measure(kafka, Path(scratch))
    short, long = grown(GROUPS), grown(GROUPS * LONGER)
    goals = {"start from a snapshot": "<= 0.6", "start without a snapshot": "<= 0.6"}
    figures = [
        Figure(
            f"{name}, {GROUPS:,} groups",
            "s" if name == WALL else "CPU s",
            round(value, 3),
            goals.get(name),
            round(seconds["read"], 3),
        )
        for name, value in seconds.items()
    ]
    figures.append(
        Figure(
            "resident, 10 times the groups",
            "MiB",
            round(long[0], 1),
            f"<= {short[0] * 1.1:.1f}",
            round(short[0], 1),
        )
    )
    figures.append(
        Figure("snapshot, 10 times the groups", "KiB", round(long[1], 1), None, round(short[1], 1))
    )
    publish(
        "fold",
        figures,
        note=f"{GROUPS:,} groups, {records:,} records. Reference: of seconds, reading alone; of sizes, {GROUPS:,} groups.",
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _print_grown(int(sys.argv[1]))
    else:
        main()
