"""A run of assembler and controller under load, whose processes are killed and started again as `hoofprint up` would do it.

`laws` says what must hold behind every crash: no acknowledged trajectory lost, none batched twice, one terminal verdict per
group, and every repetition is the same fact.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from assembler_sessions import RUN, group

from journal.clock import system_clock
from journal.event_log import read_events
from journal.payloads import PayloadStore
from journal.producer import AckProducer
from journal.reader import TopicReader
from journal.topic_admin import create_topics
from schemas import events as ev
from schemas import ids, topics
from schemas.errors import HoofprintError
from schemas.settings import Settings, load

SIZE = 4
BATCH = 4
AHEAD = 32
_OUTPUTS = (topics.CONTROL, topics.VERDICTS, topics.BATCHES)
_COUNTED = (ev.GroupCompleted, ev.GroupFailed, ev.Verdict, ev.TrainBatch)


class CrashRun:
    """Children by name; `pump` does the trainer's and the supervisor's share."""

    def __init__(self, kafka: str, directory: Path, *sets: str) -> None:
        self.settings: Settings = load(
            sets=(
                f"run.run_id={RUN}", f"run.directory={directory}", f"kafka.bootstrap_servers={kafka}",
                f"kafka.topic_prefix={uuid.uuid4().hex[:8]}", "kafka.publish_timeout_s=4", f"group.size={SIZE}",
                f"batch.size={BATCH}", *sets,
            )
        )  # fmt: skip
        self._file = directory / "settings.json"
        self._file.write_text(self.settings.to_json(), encoding="utf-8")
        self.log = directory / "processes.log"
        self.children: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        self.endings: Counter[str] = Counter()
        self.said: list[ev.Event] = []
        self.recovery_s: list[float] = []
        self._done: set[str] = set()
        self._made: list[tuple[type[ev.Event], int]] = []  # of each of `said`, with the time of its writer
        self._step = self._trained = 0
        create_topics(self.settings.kafka)
        patient = self.settings.kafka.model_copy(update={"publish_timeout_s": 60.0})
        self.producer = AckProducer(patient, "test")
        self._reader = TopicReader(patient, _OUTPUTS)
        configured = ev.RunConfigured(
            run_id=RUN, occurred_at=1, settings=self.settings.to_json(), settings_digest=self.settings.digest(), software="0"
        )  # fmt: skip
        self.producer.publish(ev.identified(configured))
        for version in ("v0", "v1"):
            self.producer.publish(
                ev.identified(ev.PolicyPublished(run_id=RUN, occurred_at=1, version=version))
            )
        self._request()

    def start(self, part: str, name: str) -> None:
        """A process of the run in a group of its own."""
        command = [sys.executable, "-m", "stack.cli", "part", part, "--settings", str(self._file)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        with self.log.open("ab") as log:
            child = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True,
                cwd=Path(__file__).parents[2],
            )  # fmt: skip
        self.children[name] = part, child

    def kill(self, name: str, *, again: bool = True) -> None:
        """kill -9; started again at once unless it stays dead."""
        part, child = self.children.pop(name)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(10)
        if again:
            self.start(part, name)

    def stop(self, name: str) -> int:
        """SIGTERM; the status. It is not started again."""
        _, child = self.children.pop(name)
        child.send_signal(signal.SIGTERM)
        return child.wait(30)

    def move_to(self, directory: Path) -> None:
        """Processes that start from now on run on another machine: nothing of the old one's directory is there."""
        run = self.settings.run.model_copy(update={"directory": str(directory)})
        self._file.write_text(self.settings.model_copy(update={"run": run}).to_json(), encoding="utf-8")

    def write(self, names: Sequence[str]) -> threading.Thread:
        """Whole groups of two turns, eight at a time, in a thread; it ends when all of them are acknowledged.

        It stays a few groups ahead of the batches, so that there is load whenever something is killed.
        """

        def work() -> None:
            for start in range(0, len(names), 8):
                while start - self._trained > AHEAD:
                    time.sleep(0.005)
                some = names[start : start + 8]
                admitted = [
                    self.producer.send(_admitted(name, start + index)) for index, name in enumerate(some)
                ]
                for future in admitted:  # as the feeder does: nobody rolls out what is not admitted yet
                    future.result(90)
                sessions = [session for name in some for session in group(name, SIZE, at=system_clock())]
                sent = [self.producer.send(event) for turn in zip(*sessions, strict=True) for event in turn]
                for future in sent:
                    future.result(90)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    def pump(self, timeout_s: float = 0.05) -> None:
        """Read what came, ask for the next batch, start again what ended by itself."""
        for record, event in read_events(self._reader.poll(timeout_s), on_bad=lambda _record, _wrong: None):
            if isinstance(event, _COUNTED):
                self.said.append(event)
                self._made.append((type(event), record.timestamp_ms))
            if isinstance(event, ev.GroupCompleted):
                self._done.add(event.group_id)
            if isinstance(event, ev.TrainBatch) and event.step == self._step:
                self._trained += len(event.groups)
                self._request()
        for name, (part, child) in list(self.children.items()):
            if child.poll() is not None:
                self.endings[f"{part}:{child.returncode}"] += 1
                self.start(part, name)

    def until(self, holds: Callable[[], bool], what: str, seconds: float = 60) -> float:
        """Pump until it holds; the seconds that took."""
        began = time.monotonic()
        while not holds():
            taken = time.monotonic() - began
            assert taken < seconds, f"{what}; {self.endings}\n{self.log.read_text(errors='replace')[-3000:]}"
            self.pump()
        return time.monotonic() - began

    def completed(self) -> int:
        """Groups of which a completion was read."""
        return len(self._done)

    def broken(self, event_type: type[ev.Event] = ev.GroupCompleted) -> Callable[[], None]:
        """Something breaks now. What it gives waits for an event that was made behind this moment, and keeps how long it took:
        one that was on its way to us already is no recovery."""
        began, at = time.monotonic(), time.time() * 1000

        def recover() -> None:
            def went_on() -> bool:
                return any(kind is event_type and made >= at for kind, made in self._made)

            self.until(went_on, f"no {event_type.__name__} any more")
            self.recovery_s.append(round(time.monotonic() - began, 2))

        return recover

    def batched(self) -> list[str]:
        """Groups by distinct batches, in order."""
        batches = {event.batch_id: event for event in self.said if isinstance(event, ev.TrainBatch)}
        return [group.group_id for batch in batches.values() for group in batch.groups]

    def acknowledged(self, writing: threading.Thread) -> None:
        """Wait until the writer is done; it waits for completions that are read here."""
        self.until(lambda: not writing.is_alive(), "not everything is acknowledged", 90)

    def laws(self, names: Sequence[str]) -> None:
        """Of a run whose groups `names` were all acknowledged."""
        self.until(lambda: len(self.batched()) >= len(names), "groups are missing in the batches")
        self.until(lambda: len(self._terminal()) >= len(names), "groups have no verdict")
        assert Counter(self.batched()) == Counter(names)
        facts = {event.event_id: event for event in self.said}
        assert all(facts[event.event_id] == event for event in self.said)
        assert self._terminal() == dict.fromkeys(names, 1)
        completions = [event for event in facts.values() if isinstance(event, ev.GroupCompleted)]
        assert Counter(event.group_id for event in completions) == Counter(names)
        store = PayloadStore(self.settings.payload_url)
        for event in completions:
            rows = store.open_arrow(event.payload)
            assert rows.column("tokens").to_pylist() == list(_tokens(event.group_id))

    def _terminal(self) -> dict[str, int]:
        """Distinct terminal verdicts per group."""
        verdicts = {event.event_id: event for event in self.said if isinstance(event, ev.Verdict)}
        return Counter(event.group_id for event in verdicts.values() if event.outcome != "retry")

    def _request(self) -> None:
        self._step += 1
        request = ev.BatchRequested(
            run_id=RUN, occurred_at=1, step=self._step, batch_id=ids.batch_id(RUN, self._step)
        )
        self.producer.send(ev.identified(request))

    def close(self) -> None:
        """End all children."""
        for _, child in self.children.values():
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait(10)
        with contextlib.suppress(HoofprintError):  # the broker of a failed test may be gone
            self.producer.close()
        self._reader.close()


def _admitted(name: str, index: int) -> ev.GroupAdmitted:
    return ev.identified(
        ev.GroupAdmitted(
            run_id=RUN, occurred_at=1, group_id=name, attempt=0, group_size=SIZE, prompt_index=index, dataset_epoch=0,
            prompt_digest="0" * 64,
        )
    )  # fmt: skip


def _tokens(name: str) -> Iterator[list[int]]:
    """Of each sequence, as `assembler_sessions` writes two turns."""
    for session in group(name, SIZE):
        raw = b"".join(e.context_ids + e.output_ids for e in session if isinstance(e, ev.TokenSegment))
        yield [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4)]
