"""A child process in a session of its own that ends with this process.

One daemon thread forks the child and waits for it: the kernel's parent-death signal fires when the forking
thread ends, so the child may be started from any thread (a pool's, say) without dying with that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from schemas.errors import TransportError

_TETHER = Path(__file__).with_name("tether.py")


class Child:
    """Running from construction on; stdout and stderr are appended to `log`."""

    def __init__(
        self, argv: list[str], log: Path, environ: dict[str, str], keep_fds: tuple[int, ...] = ()
    ) -> None:
        self._argv = [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), *argv]
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        self._started = threading.Event()
        self._ended = threading.Event()
        threading.Thread(
            target=self._own, args=(log, environ, keep_fds), name=f"owner of {argv[0]}", daemon=True
        ).start()
        self._started.wait()
        if self._error is not None:
            raise TransportError(f"{argv[0]} could not be started: {self._error}", argv=argv)

    def _own(self, log: Path, environ: dict[str, str], keep_fds: tuple[int, ...]) -> None:
        try:
            with log.open("ab") as sink:
                self._process = subprocess.Popen(
                    self._argv,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    pass_fds=keep_fds,
                    start_new_session=True,
                )
        except OSError as error:
            self._error = error
            return
        finally:
            self._started.set()
        self._process.wait()
        self._ended.set()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    @property
    def exit_status(self) -> int | None:
        """None while it runs; minus the signal's number if one ended it."""
        return self._process.returncode if self._process is not None and not self.alive else None

    def signal(self, number: signal.Signals) -> None:
        """To the whole group; nothing happens if it has ended."""
        if self.alive:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                return

    def wait(self, timeout_s: float) -> bool:
        """Has it ended within that time?"""
        return self._ended.wait(timeout_s)
