"""The proxy as a process of its own, so that it can be killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from schemas.settings import Settings

_MAIN = """
import sys
from pathlib import Path
from proxy.server import main
from schemas.settings import Settings
sys.exit(main(Settings.from_json(Path(sys.argv[1]).read_text())))
"""
_START_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ProxyProcess:
    """`settings.proxy.port` is fixed, so that a successor has the same address."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self._file = directory / "settings.json"
        self._file.write_text(settings.to_json(secrets=True))
        self._log = directory / "proxy.log"
        self.base = f"http://127.0.0.1:{settings.proxy.port}"
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def said(self) -> str:
        """Its log."""
        return self._log.read_text()

    def run_to_its_end(self) -> tuple[int, str]:
        """For a process that ends by itself: status and log."""
        self._launch()
        assert self._child is not None
        return self._child.wait(_START_S), self.said

    def _launch(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        with self._log.open("ab") as sink:
            self._child = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(self._file)],
                stdout=sink, stderr=sink, start_new_session=True, env=environment, cwd=Path(__file__).parents[2],
            )  # fmt: skip

    def start(self) -> None:
        self._launch()
        assert self._child is not None
        deadline = time.monotonic() + _START_S
        while not self._ready():
            assert self._child.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < deadline, self._log.read_text()[-3000:]
            time.sleep(0.05)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base}/readyz", timeout=2) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        """kill -9."""
        assert self._child is not None
        self._child.kill()
        self._child.wait()

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        assert self._child is not None
        self._child.send_signal(signal.SIGTERM)
        try:
            return self._child.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()
            return -9
