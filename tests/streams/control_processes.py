"""Feeder and controller as processes on a real broker, and what stands around them: a worker that completes or fails every
request at once, and a trainer that asks for the next batch when it got one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from control_log import trajectory

from journal.event_log import EventFollower
from journal.producer import AckProducer
from journal.topic_admin import create_topics
from schemas import events as ev
from schemas import topics
from schemas.events import Event, identified
from schemas.ids import batch_id
from schemas.settings import Settings, load

PATIENCE_S = 90.0
_START = (
    "import sys; from pathlib import Path; from importlib import import_module; from schemas.settings import Settings; "
    "sys.exit(import_module(sys.argv[1]).main(Settings.from_json(Path(sys.argv[2]).read_text())))"
)


class Child:
    """A part as a process in its own group."""

    def __init__(self, module: str, settings_file: Path) -> None:
        self._arguments = [sys.executable, "-c", _START, module, str(settings_file)]
        self._log = settings_file.with_name(f"{module}.log")
        self.starts = 0
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._arguments,
                stderr=log,
                stdout=log,
                env=environ,
                cwd=Path(__file__).parents[2],
                start_new_session=True,
            )

    def kill(self) -> None:
        """kill -9, then again from the start."""
        self.process.kill()
        self.process.wait()
        self.process = self._start()

    def stop(self) -> int:
        """SIGTERM; the status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def end(self) -> None:
        """Whatever a test left behind."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")


class Surroundings:
    """The rest of the loop. `seen`: every event of the followed topics in the order of arrival."""

    def __init__(self, bootstrap: str, directory: Path, run_id: str, prompts: int, **sets: Any) -> None:
        dataset = directory / "prompts.jsonl"
        dataset.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(prompts)), encoding="utf-8")
        values = {"feeder__dataset": str(dataset), "run__directory": str(directory), "kafka__topic_prefix": run_id,
                  "kafka__bootstrap_servers": bootstrap, "run__run_id": run_id, **sets}  # fmt: skip
        self.settings: Settings = load(
            sets=tuple(f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in values.items())
        )
        self.file = directory / "settings.json"
        self.file.write_text(self.settings.to_json(), encoding="utf-8")
        self.run_id = run_id
        create_topics(self.settings.kafka)
        self.producer = AckProducer(self.settings.kafka, "surroundings")
        self.follower = EventFollower(self.settings.kafka, topics.ALL_TOPICS)
        self.seen: list[Event] = []
        self.fails: Callable[[ev.GroupRequested], bool] = lambda _request: False
        self.ignores: Callable[[ev.GroupRequested], bool] = lambda _request: False

    def begin(self) -> None:
        settings = self.settings
        self.publish(
            ev.RunConfigured, settings=settings.to_json(), settings_digest=settings.digest(), software="0"
        )
        self.publish(ev.PolicyPublished, version="v0")
        self.publish(ev.PolicyActivated, version="v0", engine_id="e")
        self.publish(ev.BatchRequested, step=1, batch_id=batch_id(self.run_id, 1))

    def publish(self, event_type: type[Event], **fields: Any) -> None:
        self.producer.publish(
            identified(event_type(run_id=self.run_id, occurred_at=time.time_ns() // 1000, **fields))
        )

    def all(self, event_type: type[Any]) -> list[Any]:
        return [event for event in self.seen if isinstance(event, event_type)]

    def run_until(self, reached: Callable[[], bool]) -> None:
        """Answer what comes until `reached`."""
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < deadline, [type(event).__name__ for event in self.seen[-20:]]
            for _, event in self.follower.poll(0.2):
                self.seen.append(event)
                if isinstance(event, ev.GroupRequested) and not self.ignores(event):
                    self._roll_out(event)
                elif isinstance(event, ev.TrainBatch):
                    self._train(event)

    def _roll_out(self, request: ev.GroupRequested) -> None:
        version = f"v{len(self.all(ev.TrainBatch))}"
        facts = tuple(
            trajectory(request.group_id, request.attempt, i, version, float(i))
            for i in range(request.group_size)
        )
        common = {"group_id": request.group_id, "attempt": request.attempt, "trajectories": facts}
        if self.fails(request):
            self.publish(ev.GroupFailed, reason="trajectory_failed", **common)
        else:
            payload = ev.PayloadRef(f"{self.run_id}/{request.group_id}/x", "00", 1, "group-arrow-v1")
            self.publish(
                ev.GroupCompleted, payload=payload, sequences=len(facts), trainable_tokens=9, **common
            )

    def _train(self, batch: ev.TrainBatch) -> None:
        step = batch.step
        self.publish(
            ev.StepCompleted,
            step=step,
            batch_id=batch.batch_id,
            digest=str(step),
            checkpoint_step=step,
            metrics={},
        )
        self.publish(ev.PolicyPublished, version=f"v{step}")
        self.publish(ev.BatchRequested, step=step + 1, batch_id=batch_id(self.run_id, step + 1))

    def close(self) -> None:
        self.follower.close()
        self.producer.close()
