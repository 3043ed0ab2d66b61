"""`python -m stack.sglang.launch`: serve one checkpoint by SGLang on CPU until SIGTERM.

SGLang is four processes, of which some outlive the first by up to a minute after SIGTERM. They get a process group of their
own; this process adopts whatever they leave behind, ends the whole group and is gone only when all of them are. When it is
killed itself, its child gets SIGTERM from the kernel (`broker/tether.py`).

Exit status: 0 asked to end, 2 it can never work (no environment, no checkpoint), 1 SGLang ended by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from schemas.errors import ConfigError
from stack.sglang.command import Options, arguments, environment
from stack.sglang.environment import interpreter

GRACE_S = 4.0
"""Between SIGTERM and SIGKILL: SGLang waits for running requests, which nobody reads any more."""
_GONE_S = 10.0
_POLL_S = 0.05
_PR_SET_CHILD_SUBREAPER = 36
_TETHER = Path(__file__).parents[1] / "broker" / "tether.py"


class _Asked(Exception):
    """SIGTERM or SIGINT came."""


def parser() -> argparse.ArgumentParser:
    """The command line: that of `python -m stack.engine` as far as both have it."""
    p = argparse.ArgumentParser(prog="python -m stack.sglang.launch", description="SGLang on CPU.")
    p.add_argument("--model-path", type=Path, required=True, help="Hugging Face checkpoint directory")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--weight-version", default="default", help="label of the first weights")
    p.add_argument("--threads", type=int, default=1, help="threads of the forward pass")
    p.add_argument("--max-running", type=int, default=128, help="requests that decode together")
    p.add_argument("--context-length", type=int, default=0, help="0: the checkpoint's")
    p.add_argument("--random-seed", type=int, default=0)
    p.add_argument(
        "--incremental-streaming-output", action="store_true", help="stream deltas, not everything so far"
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """Until SGLang ends or this process is asked to."""
    options = Options(**vars(parser().parse_args(argv)))
    try:
        command = [str(interpreter()), *arguments(options)]
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    return serve(command, environment(options))


def serve(command: list[str], environ: dict[str, str]) -> int:
    """Run `command` as a group of its own; 0 if it was asked to end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ask)
    _adopt_orphans()
    child: subprocess.Popen[bytes] | None = None
    asked = False
    try:
        child = _start(command, environ)
        status = child.wait()
        print(f"SGLang ended by itself with status {status}", file=sys.stderr)
    except _Asked:
        asked = True
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if child is not None:
        end_group(child.pid)
    return 0 if asked else 1


def _start(command: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
    tied = [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), *command]
    inherited = {**os.environ, **environ}
    for name in (
        "PYTHONPATH",
        "PYTHONDONTWRITEBYTECODE",
    ):  # ours is another Python's; bytecode halves the start
        inherited.pop(name, None)
    return subprocess.Popen(tied, env=inherited, stdin=subprocess.DEVNULL, start_new_session=True)


def end_group(group: int, grace_s: float = GRACE_S) -> None:
    """SIGTERM, then SIGKILL to every process of the group; returns when all are gone."""
    _signal_group(group, signal.SIGTERM)
    if not _gone(group, grace_s):
        _signal_group(group, signal.SIGKILL)
        _gone(group, _GONE_S)


def _gone(group: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while True:
        _reap()
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)


def _reap() -> None:
    """Collect ended children, adopted ones too: an uncollected one would still count as a member of its group."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _adopt_orphans() -> None:
    """Grandchildren whose parent ended become children of this process and not of init (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _ask(signum: int, frame: FrameType | None) -> None:
    raise _Asked


if __name__ == "__main__":
    sys.exit(main())
