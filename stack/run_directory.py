"""The directory of a run: found by name, claimed by one `hoofprint up` at a time, with its settings and its supervisor's state.

settings.json    what the processes run with: addresses filled in, paths absolute
ports.json       the addresses, kept over restarts
supervisor.json  pids of the children
lock             held (flock) while the run is up; a crash frees it
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

from schemas.errors import ConfigError
from schemas.settings import Settings

SETTINGS = "settings.json"
SUPERVISOR = "supervisor.json"
_POLL_S = 0.1


def find_run(name: str, runs: Path = Path("runs")) -> Path:
    """A run's directory, given itself or as an id under ./runs. ConfigError: there is none."""
    for place in (Path(name), runs / name):
        if (place / SETTINGS).is_file() or (place / "archive").is_dir():
            return place
    raise ConfigError(f"there is no run {name}: neither a run directory nor an id under {runs}/", run=name)


def read_settings(run_directory: Path) -> Settings:
    """What the run's processes were started with. ConfigError: no such file, or not ours."""
    return settings_of(run_directory / SETTINGS)


def settings_of(file: Path) -> Settings:
    """The tree in a settings.json."""
    try:
        return Settings.from_json(file.read_text(encoding="utf-8"))
    except OSError as missing:
        raise ConfigError(f"no settings at {file}", file=str(file)) from missing
    except ValueError as wrong:
        raise ConfigError(
            f"{file} does not hold settings of this version: {wrong}", file=str(file)
        ) from wrong


def write_settings(settings: Settings) -> Path:
    """<run directory>/settings.json, whole or not at all."""
    path = settings.run_directory / SETTINGS
    fresh = path.with_suffix(".new")
    fresh.write_text(settings.model_dump_json(), encoding="utf-8")
    fresh.chmod(0o600)  # it holds the admin key, if there is one
    fresh.replace(path)
    return path


def claim(run_directory: Path) -> int:
    """Lock the run for this process; the descriptor is the lock. ConfigError: the run is up already."""
    run_directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(run_directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f"the run in {run_directory} is up already", run_directory=str(run_directory)
        ) from None
    return lock


def await_predecessors(run_directory: Path, patience_s: float) -> bool:
    """Wait for the children of a supervisor that was killed: they end by themselves, but hold ports and the broker's data
    until then. False: some are still there. Only processes whose command line names this run count, as pids come again.
    """
    try:
        facts = json.loads((run_directory / SUPERVISOR).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    children = facts if isinstance(facts, dict) else {}
    pids = [int(child["pid"]) for name, child in children.items() if name != "supervisor" and child["pid"]]
    deadline = time.monotonic() + patience_s
    while any(_is_of(run_directory, pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _is_of(run_directory: Path, pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return str(run_directory.absolute()).encode() in command
