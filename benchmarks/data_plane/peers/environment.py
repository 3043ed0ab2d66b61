"""A peer's own virtual environment in the per-user cache: hashed requirements, no addresses; made once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from stack.broker.jars import cache_root

HERE = Path(__file__).parent
LIMIT_S = 240.0


def measured(peer: str, tokens: int, trajectories: int) -> dict[str, float] | str:
    """The script's figures, or why there are none."""
    try:
        python = python_of(HERE / f"{peer}.requirements.txt")
    except subprocess.CalledProcessError as refused:
        return f"{peer} could not be installed: {(refused.stderr or '').strip()[-200:]}"
    except FileNotFoundError as missing:
        return f"{peer} could not be installed: {missing}"
    command = [str(python), str(HERE / f"{peer}_peer.py"), str(tokens), str(trajectories)]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, complaints = child.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"{peer} did not finish within {LIMIT_S:.0f} s"
    finally:
        _end_group(child.pid)
    if child.returncode:
        return f"{peer} failed: {complaints.strip()[-200:]}"
    figures: dict[str, float] = json.loads(out.strip().splitlines()[-1])
    return figures


def python_of(requirements: Path) -> Path:
    """The interpreter of the environment that these requirements make. CalledProcessError, FileNotFoundError: there is none."""
    peer = requirements.name.partition(".")[0]
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
    home = cache_root() / f"bench-{peer}-{digest}"
    python = home / "bin" / "python"
    if (home / "whole").exists():
        return python
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.is_file() else shutil.which("uv")
    if uv is None:
        raise FileNotFoundError("there is no uv (`make setup` brings it)")
    _run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(home)])
    _run([uv, "pip", "sync", "--quiet", "--require-hashes", str(requirements)], VIRTUAL_ENV=str(home))
    (home / "whole").touch()
    return python


def _run(command: list[str], **environment: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment)


def _end_group(group: int) -> None:
    """What the script left behind (Ray's daemons are in its group unless it ended in order)."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
