"""Ties a process to the one that started it, then becomes the program: `python tether.py PARENT_PID PROGRAM
ARGS...`.

Linux sends SIGTERM to a process that asked for it (PR_SET_PDEATHSIG) when its parent ends, even by kill -9,
and the wish outlives exec. A separate little program asks, and not a `preexec_fn`, which may deadlock in a
parent with threads. "Parent" means the THREAD that forked (see `child.py`). Elsewhere than on Linux nothing
is tied.

Standard library only: it runs with `-I -S`, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tie_to_parent(parent: int) -> None:
    """End this process with SIGTERM when `parent` ends; exit at once if it already has."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the wish was registered
        raise SystemExit(143)


if __name__ == "__main__":
    tie_to_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - no shell is wanted
