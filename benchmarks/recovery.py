"""How long a run under load stands still when something breaks, and what that costs: nothing may be lost, nothing come twice.

Trajectories of 2,048 tokens in groups of 8 and steps of 32 groups, on four partitions. A process that ends is started again at
once, as `hoofprint up` does it. Of several rounds the median; `lost` and `twice` are of all rounds together.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.data_plane.stage import Stage
from benchmarks.data_plane.workload import STEP
from benchmarks.figures import Figure, publish
from benchmarks.recovery_run import LoadedRun, Outcome
from stack.broker.embedded import EmbeddedKafka

ROUNDS = 3
GROUPS = 20 * STEP
BREAK_AT = 4 * STEP
SLOW_S, STUCK_S = 1.0, 7.0
_TIMEOUT = "kafka.publish_timeout_s=4"
_PAYLOADS_OF_A_FULL_DISK = "32m"  # 213 kB a group: full soon behind BREAK_AT


class Bench:
    """Every scenario has topics and processes of its own, on one broker with its data on disk."""

    def __init__(self, broker: EmbeddedKafka, scratch: Path) -> None:
        self._broker, self._scratch = broker, scratch
        self._rounds = 0

    def stage(self, *sets: str) -> Stage:
        """The next one."""
        self._rounds += 1
        return Stage(self._broker.bootstrap_servers, self._scratch / f"recovery{self._rounds}", *sets)

    def once(self, scenario: Callable[[], Outcome | None]) -> Outcome | None:
        """One round; its payloads are not kept beside those of all the others."""
        try:
            return scenario()
        finally:
            shutil.rmtree(self._scratch / f"recovery{self._rounds}", ignore_errors=True)

    def assembler(self) -> Outcome:
        """kill -9, started again."""
        with self.stage() as stage:
            run = _begun(stage)
            recovery = run.recovery()
            run.kill("assembler")
            return run.finish(recovery())

    def controller(self) -> Outcome:
        """The same; its recovery is the next batch."""
        with self.stage() as stage:
            run = _begun(stage)
            recovery = run.recovery(of_batches=True)
            run.kill("controller")
            return run.finish(recovery())

    def broker(self) -> Outcome:
        """kill -9, and up again with its data."""
        with self.stage() as stage:
            run = _begun(stage)
            recovery = run.recovery()
            self._broker.kill()
            self._broker.start()
            return run.finish(recovery())

    def joins(self) -> Outcome:
        """A second worker takes partitions from the first one."""
        with self.stage() as stage:
            run = _begun(stage)
            recovery = run.recovery()
            run.start("assembler", "second")
            return run.finish(recovery())

    def dies(self) -> Outcome:
        """One of two workers dies and stays dead."""
        with self.stage() as stage:
            run = LoadedRun(stage, GROUPS)
            for name in ("first", "second"):
                run.start("assembler", name)
            run.start("controller")
            time.sleep(6)  # both have their partitions before the load begins
            run.load(BREAK_AT)
            recovery = run.recovery()
            run.kill("first", again=False)
            return run.finish(recovery())

    def disk(self) -> Outcome | None:
        """The payload store is full until somebody makes room; None: file systems cannot be mounted here."""
        place = self._scratch / f"disk{self._rounds}"
        place.mkdir()
        if _mount("-t", "tmpfs", "-o", f"size={_PAYLOADS_OF_A_FULL_DISK}", "tmpfs", str(place)):
            return None
        try:
            with self.stage(f"payload.url={place}") as stage:
                run = _begun(stage)
                run.until(lambda: "store_error" in stage.said(), "nobody notices the full disk")
                recovery = run.recovery()
                _mount("-o", "remount,size=2g", str(place))
                return run.finish(recovery())
        finally:
            subprocess.run(["umount", "-l", str(place)], check=True)

    def still(self, seconds: float) -> Outcome:
        """The broker stands still and goes on."""
        with self.stage(_TIMEOUT) as stage:
            run = _begun(stage)
            pid = self._broker.pid
            recovery = run.recovery()
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()
            return run.finish(recovery())


def _begun(stage: Stage) -> LoadedRun:
    run = LoadedRun(stage, GROUPS)
    run.start("assembler")
    run.start("controller")
    run.load(BREAK_AT)
    return run


def _mount(*arguments: str) -> int:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode


def main(chosen: list[str]) -> None:
    """All scenarios, or those named."""
    figures: list[Figure] = []
    notes = [f"load average at the start {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"]
    with tempfile.TemporaryDirectory() as scratch, EmbeddedKafka(Path(scratch) / "broker") as broker:
        bench = Bench(broker, Path(scratch))
        scenarios: list[tuple[str, str, str | None, Callable[[], Outcome | None]]] = [
            ("assembler", "assembler, kill -9", "<= 3", bench.assembler),
            ("controller", "controller, kill -9, to its next batch", None, bench.controller),
            ("broker", "broker, kill -9, back with its data", None, bench.broker),
            ("joins", "a second worker joins", None, bench.joins),
            ("dies", "one of two workers dies", None, bench.dies),
            ("disk", "payload store full, from the moment that there is room", None, bench.disk),
            ("slow", f"broker stands still for {SLOW_S:g} s", None, lambda: bench.still(SLOW_S)),
            ("stuck", f"broker stands still for {STUCK_S:g} s, no publish waits so long", None, lambda: bench.still(STUCK_S)),
        ]  # fmt: skip
        for name, title, goal, break_it in scenarios:
            if chosen and name not in chosen:
                continue
            outcomes = [outcome for _ in range(ROUNDS) if (outcome := bench.once(break_it)) is not None]
            if not outcomes:
                notes.append(f"{name}: not possible on this machine")
                continue
            seconds = sorted(outcome.seconds for outcome in outcomes)
            notes.append(f"{name}: " + ", ".join(f"{value:.1f}" for value in seconds) + " s")
            figures += [
                Figure(title, "s", round(statistics.median(seconds), 2), goal),
                Figure(f"{title}: lost", "groups", sum(outcome.lost for outcome in outcomes), "== 0"),
                Figure(f"{title}: twice", "groups", sum(outcome.twice for outcome in outcomes), "== 0"),
            ]
            print(f"{name}: done", file=sys.stderr, flush=True)
    notes.append(f"load average at the end {os.getloadavg()[0]:.1f}")
    publish("recovery", figures, note="; ".join(notes))


if __name__ == "__main__":
    main(sys.argv[1:])
