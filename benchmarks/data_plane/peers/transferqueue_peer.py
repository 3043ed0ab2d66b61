"""The workload through TransferQueue (`transferqueue_parts`), once started, killed, and started again from its checkpoint.

Starting Ray with its actors takes most of the time, so everything that is measured shares one start.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

PARTS = str(Path(__file__).with_name("transferqueue_parts.py"))


def start(*arguments: str) -> subprocess.Popen[str]:
    """A process of the peer."""
    return subprocess.Popen([sys.executable, PARTS, *arguments], stdout=subprocess.PIPE, text=True)


def said(child: subprocess.Popen[str]) -> Any:
    """The next line of JSON; Ray says other things in between."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(("[", "{")):
            with contextlib.suppress(ValueError):
                return json.loads(line)
    raise RuntimeError("the child ended without a word")


def kill(child: subprocess.Popen[str]) -> None:
    """kill -9 of it and of everything that it started."""
    for process in [*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    child.wait()


def main(tokens: str, count: str) -> None:
    """All figures."""
    with tempfile.TemporaryDirectory() as directory:
        state = directory + "/state"
        before = start("measure", state, tokens, count)
        result = said(before)
        trained = set(said(before))
        kill(before)
        after = start("after", state)
        again = set(said(after))
        kill(after)
    print(json.dumps(result | {"lost": 512 - len(again - trained), "twice": len(again & trained)}))


if __name__ == "__main__":
    main(*sys.argv[1:3])
