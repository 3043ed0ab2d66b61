"""The embedded broker: Apache Kafka as a child process, for demos, tests and small runs.

    with EmbeddedKafka() as kafka:                    # temporary: data and log go at stop
        producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    EmbeddedKafka(Path("runs/kafka")).start()         # kept: comes up with its records, on the same port

The child has a session of its own (Ctrl-C at the terminal is for its owner, who then stops it) and ends with
this process, by kill -9 too on Linux (`child.py`). A supervisor that wants to own the process itself runs
`command()`.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from schemas.errors import ConfigError, TransportError
from stack.broker.child import Child
from stack.broker.directory import prepare, reserve
from stack.broker.jars import ensure_jars
from stack.broker.java import find_java
from stack.broker.ready import await_broker

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0  # a clean stop takes about half a second
_LAST_LINES = 15


class EmbeddedKafka:
    """One broker. `data_dir` None: a temporary one; `port` 0: the directory's own, or a free one."""

    def __init__(self, data_dir: Path | None = None, port: int = 0, log_file: Path | None = None) -> None:
        self._kept = data_dir is not None
        self._data_dir = data_dir
        self._port = port
        self._log_file = log_file
        self._child: Child | None = None

    def start(self) -> str:
        """Start it and return its bootstrap servers when it is ready; at once if it runs already.

        ConfigError: no Java, a wrong jar, a port or directory in use. TransportError: jars cannot be fetched,
        or it does not get ready; then the last lines of its log are in the message.
        """
        if self.alive:
            return self.bootstrap_servers
        atexit.register(self.stop)
        try:
            self._start()
        except BaseException:
            self.stop()  # nothing stays half started, no temporary directory stays behind
            raise
        return self.bootstrap_servers

    def _start(self) -> None:
        java, jars = find_java(), ensure_jars()
        launch = prepare(self.data_dir, self._port, java=java, jars=jars)
        self._port = launch.ports.broker
        log = self.log_file
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            said_before = log.stat().st_size if log.exists() else 0
            self._child = Child(launch.argv, log, environ=launch.environ, keep_fds=(launch.lock_fd,))
        finally:
            os.close(launch.lock_fd)  # the child holds the lock from here on
        try:
            await_broker(self.bootstrap_servers, START_TIMEOUT_S, lambda: self.alive)
        except TransportError as error:
            said = last_lines(log, since=said_before)
            raise TransportError(
                f"{error.message} Its log ends:\n{said}", log=str(log), **error.detail
            ) from None

    def stop(self) -> None:
        """Clean stop (SIGTERM, then SIGKILL); removes a temporary directory. May be repeated."""
        atexit.unregister(self.stop)
        if self._child is not None:
            self._child.signal(signal.SIGTERM)
            if not self._child.wait(STOP_TIMEOUT_S):
                self.kill()
        if not self._kept and self._data_dir is not None:
            shutil.rmtree(self._data_dir, ignore_errors=True)
            self._data_dir = None

    def kill(self) -> None:
        """SIGKILL, as a crash. The data stays (until `stop`, if temporary) and `start` brings it back."""
        if self._child is not None:
            self._child.signal(signal.SIGKILL)
            self._child.wait(STOP_TIMEOUT_S)

    def command(self) -> list[str]:
        """Runs it in the foreground, for a supervisor to own; `bootstrap_servers` is known from now on."""
        self._port = reserve(self.data_dir, self._port).broker
        argv = [sys.executable, "-m", "stack.broker", "--data", str(self.data_dir), "--port", str(self._port)]
        return [*argv, "--log", str(self._log_file)] if self._log_file else argv

    @property
    def data_dir(self) -> Path:
        """Where its data is; a temporary directory is made at the first question."""
        if self._data_dir is None:
            self._data_dir = Path(tempfile.mkdtemp(prefix="hoofprint-kafka-"))
        return self._data_dir

    @property
    def log_file(self) -> Path:
        return self._log_file or self.data_dir / "broker.log"

    @property
    def bootstrap_servers(self) -> str:
        if self._port == 0:
            raise ConfigError("The broker has no port before its first start or `command`.")
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Of Java; ConfigError if it was never started."""
        if self._child is None:
            raise ConfigError("The broker was not started.")
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.alive

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.stop()


def last_lines(log: Path, since: int = 0) -> str:
    """The end of what was written after byte `since`."""
    try:
        with log.open("rb") as source:
            source.seek(since)
            return "\n".join(source.read().decode(errors="replace").splitlines()[-_LAST_LINES:])
    except FileNotFoundError:
        return "(nothing)"
