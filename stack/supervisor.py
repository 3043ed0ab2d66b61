"""Keeps the processes of a run alive: starts them in order, restarts what dies with growing pauses, stops them in order.

Every child has a process group of its own, writes to <logs>/<name>.log, and ends when this process ends, by kill -9 too
(`broker/tether.py`; on Linux). The state file names the pid and the restarts of every child for whoever looks from
outside. A finite part that ends with 0 is done; any other end is a death. A part that cannot even begin (it says so with
exit status 2, or dies again and again before it was ever ready) ends the whole with `PartFailed`, which carries the last
lines it wrote: restarting for ever would hide the reason.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from schemas.errors import HoofprintError, InvariantBroken

State = Literal["waiting", "starting", "ready", "restarting", "done", "stopped"]
Say = Callable[[str], None]

CANNOT_WORK = 2
"""Exit status of a process that is configured in a way in which it can never work."""
_ROOT = str(Path(__file__).parents[1])
"""Children find our packages whatever directory this was started in."""
_TETHER = Path(__file__).parent / "broker" / "tether.py"
_MOST_EARLY_DEATHS = 5
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 15.0
_HEALTHY_AFTER_S = 60.0
"""A child that lived so long starts again with the shortest pause."""
_PROVEN_AFTER_S = 20.0
"""A child without a readiness probe that lived so long has shown that it can work."""
_PROBE_EVERY_S = 0.1
_LAST_LINES = 12


class PartFailed(HoofprintError):
    """A part of the run cannot begin; `detail` has its name, exit status and last lines."""

    code = "part_failed"


@dataclass(frozen=True, slots=True)
class Part:
    """One process. `after`: parts that must be ready before its first start. Parts of a higher `wave` stop earlier."""

    name: str
    argv: tuple[str, ...]
    after: tuple[str, ...] = ()
    ready: Callable[[], Awaitable[bool]] | None = None
    finite: bool = False
    wave: int = 0
    stop_s: float = 10.0
    environ: Mapping[str, str] = field(default_factory=dict)


class _Child:
    """What is known of a part at this moment."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.process: asyncio.subprocess.Process | None = None
        self.restarts = 0
        self.early_deaths = 0
        self.proven = False
        self.state: State = "waiting"
        self.was_ready = asyncio.Event()
        self.done = asyncio.Event()
        self.stopping = asyncio.Event()
        self.keeper: asyncio.Task[None] | None = None

    def signal_group(self, number: signal.Signals) -> None:
        """To the child and whatever it started."""
        if self.process is not None and self.process.returncode is None:
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                return


class Supervisor:
    """Owns the children from `start` to `stop`. Use it from the main thread's event loop (children are tied to it)."""

    def __init__(self, parts: Sequence[Part], logs: Path, state_file: Path, say: Say) -> None:
        self._children = {part.name: _Child(part) for part in parts}
        self._logs = logs
        self._state_file = state_file
        self._say = say
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, names: Sequence[str] | None = None) -> None:
        """Begin to keep these parts (all by default); returns at once."""
        self._logs.mkdir(parents=True, exist_ok=True)
        for name, child in self._children.items():
            if child.keeper is None and (names is None or name in names):
                child.keeper = asyncio.create_task(self._keep(child))
                child.keeper.add_done_callback(self._keeper_ended)
        self._write_state()

    async def wait_ready(self, names: Sequence[str] | None = None) -> None:
        """Until these parts (all by default) were ready once. Raises PartFailed."""
        wanted = self._children if names is None else names
        await self._unless_failed(asyncio.gather(*(self._children[name].was_ready.wait() for name in wanted)))

    async def wait_done(self, name: str) -> None:
        """Until a finite part has ended with 0. Raises PartFailed."""
        await self._unless_failed(self._children[name].done.wait())

    async def wait_failed(self) -> None:
        """Never returns; raises PartFailed when a part cannot work."""
        await asyncio.shield(self._failure)

    async def stop(self, names: Sequence[str] | None = None) -> None:
        """SIGTERM to these parts (all by default), wave by wave, SIGKILL to the groups that do not end in time."""
        chosen = [c for name, c in self._children.items() if names is None or name in names]
        for wave in sorted({child.part.wave for child in chosen}, reverse=True):
            await asyncio.gather(*(self._stop_child(c) for c in chosen if c.part.wave == wave))
        if names is None and self._failure.done():
            self._failure.exception()  # it was raised where somebody waited, or nobody did: either way it is seen

    def pid(self, name: str) -> int | None:
        """Of the running child."""
        process = self._children[name].process
        return process.pid if process is not None and process.returncode is None else None

    def restarts(self) -> dict[str, int]:
        """How often each part was started again."""
        return {name: child.restarts for name, child in self._children.items()}

    # --- one child ---

    async def _keep(self, child: _Child) -> None:
        part = child.part
        for name in part.after:
            await self._children[name].was_ready.wait()
        pause = _FIRST_PAUSE_S
        while not child.stopping.is_set():
            began = time.monotonic()
            status = await self._run_once(child)
            if child.stopping.is_set():
                break
            if part.finite and status == 0:
                self._say(f"{part.name} is done")
                self._enter(child, "done")
                child.done.set()
                child.was_ready.set()
                return
            lived_s = time.monotonic() - began
            self._refuse_hopeless(child, status, lived_s)
            if lived_s > _HEALTHY_AFTER_S:
                pause = _FIRST_PAUSE_S
            self._enter(child, "restarting")
            self._say(f"{part.name} {_ended(status)}; it starts again in {pause:g} s")
            await _sleep_unless(child.stopping, pause)
            child.restarts += 1
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        self._enter(child, "stopped")

    async def _run_once(self, child: _Child) -> int:
        part = child.part
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", **part.environ}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # services import twice as fast from compiled bytecode
        with (self._logs / f"{part.name}.log").open("ab") as sink:
            child.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), *part.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=environ,
                start_new_session=True,
            )
        self._enter(child, "starting")
        if child.stopping.is_set():  # asked to stop while the child was being started
            child.signal_group(signal.SIGTERM)
        probe = asyncio.create_task(self._probe(child))
        try:
            return await child.process.wait()
        finally:
            probe.cancel()
            _kill_leftovers(child.process.pid)

    async def _probe(self, child: _Child) -> None:
        if child.part.ready is not None:
            while not await child.part.ready():  # noqa: ASYNC110 — another process sets no event of ours
                await asyncio.sleep(_PROBE_EVERY_S)
            child.proven = True
        child.was_ready.set()
        self._enter(child, "ready")

    def _refuse_hopeless(self, child: _Child, status: int, lived_s: float) -> None:
        """Raise PartFailed for a part that never worked and will not."""
        child.proven = child.proven or lived_s > _PROVEN_AFTER_S
        child.early_deaths += 1
        if child.proven or (status != CANNOT_WORK and child.early_deaths < _MOST_EARLY_DEATHS):
            return
        last = last_lines(self._logs / f"{child.part.name}.log")
        raise PartFailed(
            f"{child.part.name} cannot start ({_ended(status)}): {last.splitlines()[-1] if last else 'it said nothing'}",
            part=child.part.name,
            status=status,
            last_lines=last,
        )

    async def _stop_child(self, child: _Child) -> None:
        child.stopping.set()
        if child.keeper is None:
            return
        child.signal_group(signal.SIGTERM)
        if child.state == "waiting":
            child.keeper.cancel()
        ended, _ = await asyncio.wait([child.keeper], timeout=child.part.stop_s)
        if not ended:
            self._say(f"{child.part.name} did not stop within {child.part.stop_s:g} s and was killed")
            child.signal_group(signal.SIGKILL)
            await asyncio.wait([child.keeper])

    # --- bookkeeping ---

    def _keeper_ended(self, keeper: asyncio.Task[None]) -> None:
        if keeper.cancelled():
            return
        wrong = keeper.exception()
        if wrong is not None and not self._failure.done():
            known = isinstance(wrong, HoofprintError)
            self._failure.set_exception(wrong if known else InvariantBroken(f"supervision broke: {wrong!r}"))

    async def _unless_failed(self, waiting: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(waiting)
        await asyncio.wait([task, self._failure], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._failure.result()
        await task

    def _enter(self, child: _Child, state: State) -> None:
        child.state = state
        self._write_state()

    def _write_state(self) -> None:
        """Atomically, so that a reader never sees half of it."""
        facts: dict[str, dict[str, object]] = {
            "supervisor": {"pid": os.getpid(), "restarts": 0, "state": "ready"}
        }
        for name, child in self._children.items():
            facts[name] = {"pid": self.pid(name), "restarts": child.restarts, "state": child.state}
        fresh = self._state_file.with_suffix(".new")
        fresh.write_text(json.dumps(facts, indent=1) + "\n")
        fresh.replace(self._state_file)


def _kill_leftovers(group: int) -> None:
    """What a dead child may have started and left behind."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


async def _sleep_unless(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return


def _ended(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def last_lines(log: Path, count: int = _LAST_LINES) -> str:
    """The end of a log file."""
    try:
        with log.open("rb") as source:
            source.seek(max(0, source.seek(0, os.SEEK_END) - 8192))
            return "\n".join(source.read().decode(errors="replace").strip().splitlines()[-count:])
    except FileNotFoundError:
        return ""
