"""SGLang's virtual environment: made once per user, apart from ours, from hashes.

`python -m stack.sglang.environment` makes it (`make sglang-setup`). Invariants: an environment is used only when it is
complete (a mark is written last, which names what it was made from); two processes that start at once make it once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from schemas.errors import ConfigError, HoofprintError, TransportError
from stack.broker.jars import cache_root

VERSION: Final = "0.5.23"
HERE: Final = Path(__file__).parent
REQUIREMENTS: Final = HERE / "requirements.lock"
SHIM: Final = HERE / "shim"
PYTHON: Final = "3.11"
_MARK: Final = "hoofprint-ready"


def directory() -> Path:
    """Where the environment of this user is."""
    return cache_root() / f"sglang-{VERSION}"


def interpreter() -> Path:
    """The environment's Python. ConfigError: it was never made, or from other requirements."""
    if not _is_made():
        raise ConfigError(
            f"SGLang is not installed in {directory()}: `make sglang-setup` does it",
            directory=str(directory()),
        )
    return directory() / "bin" / "python"


def ensure_environment() -> Path:
    """The environment's Python, made if need be (about 6 GB). ConfigError: no uv; TransportError: a step failed."""
    root = directory()
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.with_name(f"{root.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it ends with the process, so a crash leaves no stale one
        if not _is_made():  # another process may have made it while this one waited
            _make(root)
    return interpreter()


def _is_made() -> bool:
    try:
        return (directory() / _MARK).read_text() == _source()
    except OSError:
        return False


def _source() -> str:
    """Digest of everything the environment is made from."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes())
    for file in sorted(SHIM.rglob("*")):
        if file.suffix in (".py", ".toml"):
            digest.update(str(file.relative_to(SHIM)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _make(root: Path) -> None:
    uv = _uv()
    (root / _MARK).unlink(missing_ok=True)
    if not (root / "bin" / "python").exists():
        _run(uv, "venv", "--quiet", "--python", PYTHON, str(root))
    target = ("--quiet", "--python", str(root / "bin" / "python"))
    _run(uv, "pip", "sync", *target, "--require-hashes", str(REQUIREMENTS))
    with tempfile.TemporaryDirectory() as scratch:  # a build writes beside its source
        copy = shutil.copytree(SHIM, Path(scratch) / "shim", ignore=shutil.ignore_patterns("__pycache__"))
        _run(uv, "pip", "install", *target, "--no-deps", "--no-build-isolation", str(copy))
    (root / _MARK).write_text(_source())


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.is_file() else shutil.which("uv")
    if uv is None:
        raise ConfigError("SGLang's environment is made by uv, which was not found; `make setup` brings it.")
    return uv


def _run(*argv: str) -> None:
    # compiled at their first import: only a part of these packages is ever imported
    environ = {**os.environ, "UV_COMPILE_BYTECODE": "0"}
    done = subprocess.run(argv, cwd=HERE, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TransportError(
            f"SGLang's environment could not be made, {' '.join(argv[1:3])} failed: {done.stderr.strip()[-500:]}",
            exit_code=done.returncode,
        )


def main() -> int:
    """Make it; a failure is one sentence."""
    try:
        print(ensure_environment())
    except HoofprintError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
