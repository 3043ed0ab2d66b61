"""Metrics endpoint of the stream processes: text that Prometheus reads, numbers from the state, off unless asked for."""

from __future__ import annotations

import socket
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from control_log import RUN, admitted, completed, configured, failed, published, requested, step_completed
from control_processes import Child, Surroundings
from prometheus_client.parser import text_string_to_metric_families
from test_control_worker import Raw

from journal.metrics_http import Number, serve_metrics
from schemas import events as ev
from schemas import topics
from schemas.codec import encode
from schemas.errors import ConfigError
from streams.assembly import Assembly, AssemblyRules
from streams.assembly_closed import ClosedAttempts
from streams.control_output import Written
from streams.control_worker import ControllerWorker
from streams.stream_numbers import assembler_numbers, controller_numbers


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scraped(port: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_numbers_are_served_as_they_are_at_that_moment_and_nothing_with_port_0() -> None:
    value = [1.0]
    assert serve_metrics(0, list) == 0
    port = serve_metrics(
        free_port(),
        lambda: [
            Number("hoofprint_open_groups", value[0]),
            Number("hoofprint_verdicts_total", 2, {"outcome": "kept", "reason": "trained"}),
            Number("hoofprint_verdicts_total", 3, {"outcome": "dropped", "reason": "stale"}),
            Number("staleness/version_gap_mean", 0.5),
        ],
    )
    value[0] = 7.0
    assert scraped(port) == {
        ("hoofprint_open_groups", ()): 7.0,
        ("hoofprint_verdicts_total", (("outcome", "kept"), ("reason", "trained"))): 2.0,
        ("hoofprint_verdicts_total", (("outcome", "dropped"), ("reason", "stale"))): 3.0,
        ("staleness_version_gap_mean", ()): 0.5,
    }


def test_a_taken_port_is_an_error_unless_the_next_one_will_do() -> None:
    port = serve_metrics(free_port(), list)
    with pytest.raises(ConfigError, match=str(port)):
        serve_metrics(port, list)
    assert serve_metrics(port, list, or_next=True) > port


def values(worker: ControllerWorker) -> dict[str, float]:
    return {
        number.name + "".join(f",{v}" for v in number.labels.values()): number.value
        for number in controller_numbers(worker.state, worker.staleness)
    }


def test_the_controller_shows_dressages_numbers_of_the_newest_batch() -> None:
    worker = ControllerWorker(RUN, {t.name: Written(t) for t in (topics.VERDICTS, topics.BATCHES)}, set())
    mixed = completed("b", ["v1", "v2"])
    partial = msgspec.structs.replace(mixed.trajectories[1], versions=("v1", "v2"))
    mixed = msgspec.structs.replace(mixed, trajectories=(mixed.trajectories[0], partial))
    refused = failed("c", versions=["v2", "v2"])
    facts = tuple(
        msgspec.structs.replace(t, reason="partial_rollout_staleness_exceeded") for t in refused.trajectories
    )
    log: list[ev.Event] = [
        configured(window__keep_versions=2, batch__size=1), published("v0"), published("v1"), published("v2"),
        *map(admitted, "abc"), completed("a", ["v0", "v1"]), msgspec.structs.replace(refused, trajectories=facts),
        mixed, requested(1), completed("a", ["v0", "v1"]), mixed,
    ]  # fmt: skip
    for offset, event in enumerate(log):
        worker.take(Raw(offset, encode(event)))
    found = values(worker)
    assert {name: found[name] for name in found if name.startswith("staleness/")} == {
        "staleness/dropped_groups": 1,
        "staleness/current_version_index": 2,
        "staleness/cutoff_version_index": 1,
        "staleness/partial_rollout_rejected_groups": 1,
        "staleness/partial_rollout_rejected_samples": 2,
        "staleness/version_gap_min": 0,
        "staleness/version_gap_max": 1,
        "staleness/version_gap_mean": 0.5,
        "staleness/version_span_min": 1,
        "staleness/version_span_max": 2,
        "staleness/version_span_mean": 1.5,
    }
    assert found["hoofprint_verdicts_total,kept,trained"] == 1
    assert found["hoofprint_verdicts_total,retry,timeout"] == 1
    assert found["hoofprint_ignored_control_events_total,late_ends"] == 2
    assert (found["hoofprint_batches_total"], found["hoofprint_outstanding_groups"]) == (1, 1)
    assert worker.staleness._complete == {}


def test_the_lag_of_the_newest_batch_is_split_by_where_versions_came() -> None:
    """Tokens of v0 and v1, complete under v1, in a batch under v3, trained on v4; before that, nothing is known of it."""
    worker = ControllerWorker(RUN, {t.name: Written(t) for t in (topics.VERDICTS, topics.BATCHES)}, set())
    log: list[ev.Event] = [
        configured(window__keep_versions=9, batch__size=1), published("v0"), admitted("a"), published("v1"),
        completed("a", ["v0", "v1"]), published("v2"), published("v3"), requested(1), published("v4"),
        step_completed(9), step_completed(1), published("v5"),
    ]  # fmt: skip
    found = []
    for offset, event in enumerate(log):
        worker.take(Raw(offset, encode(event)))
        now = values(worker)
        found.append([now.get(f"hoofprint_lag_{part}") for part in ("in_flight", "in_queue", "at_training")])
    assert found[:7] == [[None] * 3] * 7
    assert found[7:] == [[0.5, 2, 0], [0.5, 2, 0], [0.5, 2, 0], [0.5, 2, 1], [0.5, 2, 1]]


@pytest.mark.parametrize(("label", "spans"), [("v0", {1.0}), ("unknown", set())])
def test_f9_versions_that_do_not_reach_the_log_show_in_the_numbers(label: str, spans: set[float]) -> None:
    """Versions are published, and every trajectory says the same one, or none: its span cannot vary, and the gap only grows."""
    worker = ControllerWorker(RUN, {t.name: Written(t) for t in (topics.VERDICTS, topics.BATCHES)}, set())
    log: list[ev.Event] = [configured(window__keep_versions=9, batch__size=1), published("v0")]
    for step, group in enumerate("abc", start=1):
        log += [requested(step), admitted(group), completed(group, [label, label]), published(f"v{step}")]
    found: list[dict[str, float]] = []
    for offset, event in enumerate(log):
        worker.take(Raw(offset, encode(event)))
        if isinstance(event, ev.GroupCompleted):
            found.append(values(worker))
    names = [f"staleness/version_span_{what}" for what in ("min", "max", "mean")]
    assert {one[name] for one in found for name in names if name in one} == spans
    gaps = [one["staleness/version_gap_max"] for one in found]
    assert gaps == ([0, 1, 2] if spans else [0, 0, 0])
    assert [one["staleness/current_version_index"] for one in found] == [0, 1, 2]


def test_a_window_that_is_off_has_no_staleness_numbers() -> None:
    worker = ControllerWorker(RUN, {}, set())
    worker.take(Raw(0, encode(configured(window__keep_versions=0))))
    assert not [name for name in values(worker) if name.startswith("staleness/")]


def test_the_assembler_shows_what_became_of_its_records() -> None:
    state = Assembly(AssemblyRules(RUN, 2, 10**15, 0), ClosedAttempts(RUN))
    state.counts.update(applied=5, duplicate=2, groups_completed=1)
    found = {(n.name, *n.labels.values()): n.value for n in assembler_numbers(state.counts, 3)}
    assert found["hoofprint_events_total", "applied"] == 5
    assert found["hoofprint_duplicates_total",] == 2
    assert found["hoofprint_groups_completed_total",] == 1
    assert found["hoofprint_open_groups",] == 3


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.end()


@pytest.mark.broker
def test_feeder_and_controller_serve_theirs_while_they_run(
    kafka: str, tmp_path: Path, children: list[Child]
) -> None:
    feeder_port, controller_port = free_port(), free_port()
    around = Surroundings(
        kafka, tmp_path, uuid.uuid4().hex[:8], prompts=6, batch__size=2, group__size=2, metrics__feeder_port=feeder_port,
        metrics__controller_port=controller_port,
    )  # fmt: skip
    around.ignores = lambda request: request.prompt_index == 5
    around.begin()
    children += [Child("streams.feeder", around.file), Child("streams.controller_app", around.file)]
    around.run_until(lambda: len(around.all(ev.TrainBatch)) >= 2)
    assert scraped(controller_port)["hoofprint_batches_total", ()] == 2
    found = scraped(feeder_port)
    assert found["hoofprint_admitted_groups_total", ()] == 6
    assert found["hoofprint_alarms_total", ()] == 0
    around.close()
