"""Crash matrix of the processors on a real broker: kill -9 at moments of a seeded dice under load, two workers, a full disk."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from assembler_sessions import RUN
from crash_run import CrashRun

from schemas import events as ev

pytestmark = pytest.mark.broker

NAMES = [f"g{number}" for number in range(256)]
REST = 96
"""So many groups are left behind the last kill: there must be work for a recovery to show."""


@pytest.fixture
def run(kafka: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> Iterator[CrashRun]:
    """Its recovery times stand in the report of the test."""
    run = CrashRun(kafka, tmp_path)
    yield run
    record_property("recovery_s", run.recovery_s)
    run.close()


def test_assembler_and_controller_die_at_random_moments_under_load(run: CrashRun) -> None:
    dice = random.Random(5)
    run.start("assembler", "assembler")
    run.start("controller", "controller")
    writing = run.write(NAMES)
    moments = sorted(dice.sample(range(4, len(NAMES) - REST), 4))
    for moment, victim in zip(moments, ["assembler", "controller", "assembler", "controller"], strict=True):
        run.until(lambda moment=moment: run.completed() >= moment, "groups do not complete")  # type: ignore[misc]
        recover = run.broken(ev.GroupCompleted if victim == "assembler" else ev.TrainBatch)
        run.kill(victim)
        recover()
    run.acknowledged(writing)
    run.laws(NAMES)
    assert len(run.recovery_s) == len(moments)


def test_one_worker_joins_in_mid_stream_and_another_dies(run: CrashRun) -> None:
    run.start("assembler", "first")
    run.start("controller", "controller")
    writing = run.write(NAMES)
    run.until(lambda: run.completed() >= 16, "groups do not complete")
    recover = run.broken()
    run.start("assembler", "second")
    recover()
    run.until(lambda: run.completed() >= 32, "groups do not complete with two workers")
    recover = run.broken()
    run.kill("first", again=False)
    recover()
    run.acknowledged(writing)
    run.laws(NAMES)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for some of the payloads."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_ends_the_assembler_and_costs_nothing_once_there_is_room(
    kafka: str, tmp_path: Path, small_disk: Path, record_property: Callable[[str, object], None]
) -> None:
    run = CrashRun(kafka, tmp_path, f"payload.url={small_disk}")
    try:
        run.start("assembler", "assembler")
        run.start("controller", "controller")
        run.acknowledged(run.write(NAMES[:32]))
        run.until(lambda: run.endings["assembler:1"] >= 1, "the assembler does not notice the full disk")
        assert '"code":"store_error"' in run.log.read_text()
        assert not list(small_disk.rglob("*.tmp"))  # nothing half-written
        assert 0 < run.completed() < 32
        recover = run.broken()
        subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
        recover()
        run.laws(NAMES[:32])
        record_property("recovery_s", run.recovery_s)
    finally:
        run.close()


def test_sigterm_under_load_ends_each_process_in_order_and_nothing_is_done_again(run: CrashRun) -> None:
    run.start("assembler", "assembler")
    run.start("controller", "controller")
    writing = run.write(NAMES)
    for moment, name in ((16, "assembler"), (48, "controller"), (80, "assembler")):
        run.until(lambda moment=moment: run.completed() >= moment, "groups do not complete")  # type: ignore[misc]
        recover = run.broken(ev.GroupCompleted if name == "assembler" else ev.TrainBatch)
        assert run.stop(name) == 0
        run.start(name, name)
        recover()
    assert "stopped_hard" not in run.log.read_text()
    run.acknowledged(writing)
    run.laws(NAMES)
    assert len(run.said) == len({event.event_id for event in run.said})


def test_the_state_comes_back_on_another_machine_from_the_log(
    kafka: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Only the log and the payload store are shared: the directory with snapshots and logs is not there."""
    run = CrashRun(kafka, tmp_path, f"payload.url={tmp_path / 'shared'}")
    try:
        for name in ("assembler", "controller"):
            run.start(name, name)
        writing = run.write(NAMES)
        run.until(lambda: len(run.batched()) >= 32, "no batches")
        assert run.stop("controller") == 0  # in order, so that it leaves a snapshot behind on the old machine
        run.kill("assembler", again=False)
        assert list((tmp_path / RUN / "controller").iterdir())
        recover = run.broken(ev.TrainBatch)
        run.move_to(tmp_path / "elsewhere")
        for name in ("assembler", "controller"):
            run.start(name, name)
        recover()
        run.acknowledged(writing)
        run.laws(NAMES)
        record_property("recovery_s", run.recovery_s)
        assert '"snapshot":0' in run.log.read_text().rpartition('"event":"folding"')[0].rpartition("\n")[2]
    finally:
        run.close()
