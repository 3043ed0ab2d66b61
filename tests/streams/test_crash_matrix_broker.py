"""Crash matrix of the broker, which is this test's own: kill -9 with its data, slow, stuck for longer than a publish may take."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crash_run import CrashRun

from stack.broker.embedded import EmbeddedKafka

pytestmark = pytest.mark.broker

NAMES = [f"g{number}" for number in range(48)]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(tmp_path / "broker") as broker:
        yield broker


@pytest.fixture
def run(
    broker: EmbeddedKafka, tmp_path: Path, record_property: Callable[[str, object], None]
) -> Iterator[CrashRun]:
    """Its recovery times stand in the report of the test."""
    run = CrashRun(broker.bootstrap_servers, tmp_path)
    run.start("assembler", "assembler")
    run.start("controller", "controller")
    yield run
    record_property("recovery_s", run.recovery_s)
    run.close()


def test_a_killed_broker_comes_back_with_its_data(run: CrashRun, broker: EmbeddedKafka) -> None:
    writing = run.write(NAMES)
    run.until(lambda: run.completed() >= 16, "groups do not complete")
    recover = run.broken()
    broker.kill()
    broker.start()
    recover()
    run.acknowledged(writing)
    run.laws(NAMES)


@pytest.mark.parametrize("stuck_s", [1.0, 7.0], ids=["slow", "stuck"])
def test_a_broker_that_stands_still_and_goes_on(run: CrashRun, broker: EmbeddedKafka, stuck_s: float) -> None:
    """One second: everybody waits. Seven: longer than a publish of the processes may take; they end and are started again."""
    writing = run.write(NAMES)
    run.until(lambda: run.completed() >= 16, "groups do not complete")
    recover = run.broken()
    os.kill(broker.pid, signal.SIGSTOP)
    threading.Timer(stuck_s, os.kill, (broker.pid, signal.SIGCONT)).start()
    recover()
    run.acknowledged(writing)
    run.laws(NAMES)
