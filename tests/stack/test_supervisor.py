"""Supervision with small real processes: order, restarts, ends, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from stack.supervisor import Part, PartFailed, Supervisor

SLEEPER = "import time\nwhile True: time.sleep(60)"


def part(name: str, code: str, **options: object) -> Part:
    return Part(name, (sys.executable, "-c", code), **options)  # type: ignore[arg-type]


@asynccontextmanager
async def supervising(tmp_path: Path, *parts: Part) -> AsyncIterator[tuple[Supervisor, list[str]]]:
    said: list[str] = []
    supervisor = Supervisor(parts, tmp_path / "logs", tmp_path / "supervisor.json", said.append)
    supervisor.start()
    try:
        yield supervisor, said
    finally:
        await supervisor.stop()


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 — polls processes
            await asyncio.sleep(0.02)


def state(tmp_path: Path) -> dict[str, dict[str, object]]:
    return dict(json.loads((tmp_path / "supervisor.json").read_text()))


async def test_a_killed_child_comes_back_and_it_is_said(tmp_path: Path) -> None:
    async with supervising(tmp_path, part("sleeper", SLEEPER)) as (supervisor, said):
        await supervisor.wait_ready()
        first = supervisor.pid("sleeper")
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervisor.pid("sleeper") not in (None, first))
        await until(lambda: state(tmp_path)["sleeper"] == {
            "pid": supervisor.pid("sleeper"), "restarts": 1, "state": "ready",
        })  # fmt: skip
        assert said == ["sleeper was ended by SIGKILL; it starts again in 0.5 s"]
    assert state(tmp_path)["sleeper"] == {"pid": None, "restarts": 1, "state": "stopped"}


async def test_a_part_starts_when_those_before_it_are_ready(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    async def open_now() -> bool:
        return gate.exists()

    first = part("first", SLEEPER, ready=open_now)
    second = part("second", SLEEPER, after=("first",))
    async with supervising(tmp_path, second, first) as (supervisor, _):
        await until(lambda: supervisor.pid("first"))
        assert supervisor.pid("second") is None
        gate.touch()
        await supervisor.wait_ready()
        assert supervisor.pid("second") is not None


async def test_a_finite_part_that_ends_well_is_done(tmp_path: Path) -> None:
    async with supervising(tmp_path, part("job", "print('worked')", finite=True)) as (supervisor, said):
        await asyncio.wait_for(supervisor.wait_done("job"), 30)
        assert said == ["job is done"]
        assert (tmp_path / "logs" / "job.log").read_text() == "worked\n"
        assert supervisor.restarts() == {"job": 0}


async def test_a_finite_part_that_fails_is_tried_again(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = (
        f"import pathlib, sys\np = pathlib.Path({str(mark)!r})\nif not p.exists():\n p.touch(); sys.exit(1)"
    )
    async with supervising(tmp_path, part("job", code, finite=True)) as (supervisor, said):
        await asyncio.wait_for(supervisor.wait_done("job"), 30)
        assert said[0] == "job ended with status 1; it starts again in 0.5 s"


async def test_a_part_that_can_never_work_ends_everything_with_its_own_words(tmp_path: Path) -> None:
    code = "import sys\nprint('setting x: no such thing', file=sys.stderr)\nsys.exit(2)"
    async with supervising(tmp_path, part("wrong", code), part("sleeper", SLEEPER)) as (supervisor, _):
        with pytest.raises(PartFailed, match=r"wrong cannot start .*setting x: no such thing"):
            await asyncio.wait_for(supervisor.wait_failed(), 30)


async def test_what_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}])\nprint(child.pid, flush=True)\n"
        "while True: time.sleep(60)"
    )
    log = tmp_path / "logs" / "stubborn.log"
    async with supervising(tmp_path, part("stubborn", code, stop_s=0.3)) as (supervisor, said):
        await until(lambda: log.exists() and log.read_text().endswith("\n"))
        pids = [int(log.read_text()), supervisor.pid("stubborn")]
    assert said[-1] == "stubborn did not stop within 0.3 s and was killed"
    await until(lambda: not any(alive(pid) for pid in pids))


async def test_higher_waves_stop_first(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n"
        f"    open({str(tmp_path / 'order')!r}, 'a').write(sys.argv[1])\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('up', flush=True)\nwhile True: time.sleep(60)"
    )
    names = {"a": 0, "b": 2, "c": 1}
    parts = [Part(n, (sys.executable, "-c", code, n), wave=wave) for n, wave in names.items()]
    async with supervising(tmp_path, *parts):
        await until(lambda: len(list((tmp_path / "logs").glob("*.log"))) == 3)
        await until(lambda: all(log.read_text() for log in (tmp_path / "logs").glob("*.log")))
    assert (tmp_path / "order").read_text() == "bca"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="children are tied to their parent on Linux")
def test_children_end_with_a_killed_supervisor(tmp_path: Path) -> None:
    program = (
        "import asyncio, pathlib, sys\nfrom stack.supervisor import Part, Supervisor\n"
        "async def main(at):\n"
        f"    parts = [Part('sleeper', (sys.executable, '-c', {SLEEPER!r}))]\n"
        "    s = Supervisor(parts, at / 'logs', at / 'supervisor.json', print)\n"
        "    s.start()\n    await s.wait_ready()\n    await s.wait_failed()\n"
        "asyncio.run(main(pathlib.Path(sys.argv[1])))"
    )
    owner = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], start_new_session=True)
    deadline = time.monotonic() + 30
    pid: object = None
    while pid is None and time.monotonic() < deadline:
        if (tmp_path / "supervisor.json").exists():
            pid = state(tmp_path)["sleeper"]["pid"]
    assert isinstance(pid, int)
    owner.kill()
    owner.wait()
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)


def alive(pid: int | None) -> bool:
    try:
        return pid is not None and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
