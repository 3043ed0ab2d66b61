"""A broker with topics of one run, and the processes of the data plane as `hoofprint up` starts them.

CPU of a process is what the kernel says of it (all its threads), read before and after a round.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from benchmarks.data_plane.workload import GROUP, RUN, STEP, VERSIONS
from journal.producer import AckProducer
from journal.topic_admin import create_topics
from schemas import events as ev
from schemas.settings import Settings, load

PATIENCE_S = 90.0


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class Stage:
    """Topics below a prefix of their own, settings for them, and children that end with it."""

    def __init__(
        self, bootstrap_servers: str, directory: Path, *more: str, partitions: int = 4, fsync: bool = False
    ) -> None:
        """`more`: settings as `--set` takes them."""
        sets = (
            f"run.run_id={RUN}", f"run.directory={directory}", f"kafka.bootstrap_servers={bootstrap_servers}",
            f"kafka.topic_prefix={directory.name}", f"kafka.partitions={partitions}", f"payload.fsync={str(fsync).lower()}",
            f"group.size={GROUP}", "group.timeout_s=3600", f"batch.size={STEP}", "feeder.max_outstanding_groups=100000",
            *more,
        )  # fmt: skip
        directory.mkdir(parents=True)
        self.settings: Settings = load(sets=sets)
        self._file = directory / "settings.json"
        self._file.write_text(self.settings.to_json(), encoding="utf-8")
        self._log = directory / "processes.log"
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        create_topics(self.settings.kafka)
        self.producer = AckProducer(self.settings.kafka, "bench-control")
        self._configure()

    def _configure(self) -> None:
        self.producer.publish(
            ev.identified(
                ev.RunConfigured(
                    run_id=RUN, occurred_at=1, settings=self.settings.to_json(), settings_digest=self.settings.digest(),
                    software="0",
                )
            )
        )  # fmt: skip
        for step, version in enumerate(VERSIONS):
            self.producer.publish(
                ev.identified(ev.PolicyPublished(run_id=RUN, occurred_at=1, version=version, step=step))
            )

    def admit(self, names: list[str]) -> None:
        """As the feeder does, before anybody rolls them out."""
        for index, name in enumerate(names):
            self.producer.send(
                ev.identified(
                    ev.GroupAdmitted(
                        run_id=RUN, occurred_at=1, group_id=name, attempt=0, group_size=GROUP, prompt_index=index,
                        dataset_epoch=0, prompt_digest="0" * 64,
                    )
                )
            )  # fmt: skip
        self.producer.flush()

    def start(self, part: str, name: str | None = None) -> subprocess.Popen[bytes]:
        """A process of the run, in a group of its own."""
        command = [sys.executable, "-m", "stack.cli", "part", part, "--settings", str(self._file)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        with self._log.open("ab") as log:
            child = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self.children[name or part] = child
        return child

    def kill(self, name: str) -> None:
        """kill -9, and wait until it is gone."""
        child = self.children[name]
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(10)

    def said(self) -> str:
        """What the children have logged so far."""
        return self._log.read_text(errors="replace")

    def cpu(self) -> dict[str, float]:
        """CPU seconds of every child that lives."""
        return {name: cpu_of(child.pid) for name, child in self.children.items() if child.poll() is None}

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait. SystemExit with the end of the processes' log when it takes too long or one of them ended."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            if time.monotonic() > deadline:
                tail = self._log.read_text(errors="replace")[-3000:]
                raise SystemExit(f"{what}: not within {PATIENCE_S} s\n{tail}")

    def close(self) -> None:
        """End the children."""
        for child in self.children.values():
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait(10)
        self.producer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
