"""A small demo as a user starts it, in a process group of its own, observed through its state file and its log only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from journal.reader import TopicReader
from schemas.codec import decode
from schemas.errors import HoofprintError
from schemas.events import Event, StepCompleted
from schemas.settings import KafkaSettings
from schemas.topics import CONTROL

POLL_S = 0.3


class DemoRun:
    """`hoofprint demo` with `steps` optimizer steps under `directory`."""

    def __init__(self, directory: Path, steps: int, *sets: str) -> None:
        self.directory = directory / "e2e"
        self.output = directory / "demo.out"
        command = [sys.executable, "-m", "stack.cli", "demo", "--task", "dial", "--steps", str(steps)]
        for assignment in (f"run.directory={directory}", "run.run_id=e2e", *sets):
            command += ["--set", assignment]
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        with self.output.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environ
            )

    def children(self) -> dict[str, Any]:
        """Name to pid, restarts and state, as the supervisor wrote it; empty before it started."""
        try:
            return dict(json.loads((self.directory / "supervisor.json").read_text()))
        except FileNotFoundError:
            return {}

    def steps(self) -> int:
        """Completed optimizer steps in the log; 0 while the log cannot be read."""
        try:
            return sum(isinstance(event, StepCompleted) for event in self.control(timeout_s=3))
        except (HoofprintError, FileNotFoundError):
            return 0

    def control(self, timeout_s: float) -> list[Event]:
        """The control log so far."""
        tree = json.loads((self.directory / "settings.json").read_text())["kafka"]
        kafka = KafkaSettings.model_validate(tree | {"publish_timeout_s": timeout_s})
        reader = TopicReader(kafka, [CONTROL])
        try:
            return [decode(record.value) for record in reader.read_to_end()]
        finally:
            reader.close()

    def wait_for_steps(self, steps: int, deadline_s: float) -> None:
        """Until so many steps are done. Fails with the demo's output when it ends or hangs before."""
        deadline = time.monotonic() + deadline_s
        while self.steps() < steps:
            assert self._process.poll() is None, f"the demo ended early\n{self.said()}"
            assert time.monotonic() < deadline, f"no step {steps} in {deadline_s} s\n{self.said()}"
            time.sleep(POLL_S)

    def kill(self, name: str) -> None:
        """SIGKILL one child."""
        os.kill(int(self.children()[name]["pid"]), signal.SIGKILL)

    def wait(self, deadline_s: float) -> int:
        """Exit status of the demo."""
        return self._process.wait(deadline_s)

    def said(self) -> str:
        """The end of its output."""
        return self.output.read_text(errors="replace")[-6000:]

    def stop(self) -> None:
        """End it and all its children, whatever state they are in."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
