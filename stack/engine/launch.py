"""Start the engine as a child process of its own group, wait until it is healthy, stop it.

Used by the tests and by whoever wants an engine without a supervisor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from schemas.errors import EngineUnavailable


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class EngineProcess:
    """One engine child; `flags` are the command line's: `EngineProcess(path, min_step_ms=20)`. `module` is what is run: ours,
    or another that takes the same flags."""

    def __init__(
        self,
        model_path: Path,
        port: int = 0,
        *,
        module: str = "stack.engine",
        log: Path | None = None,
        **flags: str | int | float | bool,
    ) -> None:
        self.model_path = model_path
        self._module = module
        self.port = port or free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._flags = flags
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The child's process id, which is its group's too."""
        assert self._child is not None, "not started"
        return self._child.pid

    def command(self) -> list[str]:
        """The child's command line."""
        command = [
            sys.executable,
            "-m",
            self._module,
            "--model-path",
            str(self.model_path),
            "--port",
            str(self.port),
        ]
        for name, value in self._flags.items():
            option = "--" + name.replace("_", "-")
            if value is True:
                command.append(option)
            elif value is not False:
                command += [option, str(value)]
        return command

    def start(self, timeout_s: float = 90.0) -> str:
        """Start the child and return its base URL once `/health` answers 200."""
        log = self._log or self._temporary_log()
        threads = str(self._flags.get("threads", 1))
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        root = str(Path(__file__).parents[2])  # the child finds the package wherever it was started
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # imports are twice as fast with bytecode
        with log.open("ab") as sink:
            self._child = subprocess.Popen(
                self.command(), stdout=sink, stderr=sink, start_new_session=True, env=environment
            )
        deadline = time.monotonic() + timeout_s
        while not self._healthy():
            code = self._child.poll()
            if code is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-2000:]
                self.kill()
                raise EngineUnavailable(
                    f"the engine did not come up (exit code {code}): {tail}", exit_code=code
                )
            time.sleep(0.05)
        return self.base_url

    def _temporary_log(self) -> Path:
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="engine-")
        return Path(self._scratch.name) / "engine.log"

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=2.0) as reply:  # noqa: S310
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self, timeout_s: float = 8.0) -> int:
        """SIGTERM, then SIGKILL after `timeout_s`; returns the exit code."""
        assert self._child is not None, "not started"
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout_s)
        self.kill()
        return self._child.wait()

    def kill(self) -> None:
        """SIGKILL the whole group, if it is alive, and wait for it."""
        if self._child is not None and self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def __enter__(self) -> EngineProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
