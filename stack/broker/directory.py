"""A broker's data directory: who holds it, its ports, its configuration, its format.

    lock               held (flock) by the running broker itself: a crash frees it
    ports.json         the ports of the first start; clients reconnect to the same address after a restart
    server.properties  written at every start from `server.properties.tmpl`
    log/               Kafka's own directory (`log.dirs`)
    broker.log         what the broker says, if no other file was named

Invariants: one broker per directory; a directory is formatted once; the same directory comes up on the same
port unless another is asked for.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import random
import socket
import string
import subprocess
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from schemas.errors import ConfigError, TransportError
from stack.broker.jars import locked_jars

_HERE = Path(__file__).parent
# Below Linux's ephemeral range (32768 and up): a client that keeps reconnecting while the broker is down
# could be given the broker's port as its own source port, connect to itself, and so keep the broker from
# binding it again.
_PORTS = range(20_000, 32_768)
_JVM = ("-Xms256m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:+ExitOnOutOfMemoryError")


@dataclass(frozen=True, slots=True)
class Ports:
    """Where clients connect, and the controller's own listener (nobody outside needs it)."""

    broker: int
    controller: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything to start the broker with. Whoever starts it lets the process inherit `lock_fd`."""

    argv: list[str]
    environ: dict[str, str]
    ports: Ports
    lock_fd: int


def prepare(directory: Path, port: int, *, java: Path, jars: Path) -> Launch:
    """Claim, configure and (the first time) format `directory`. `port` 0: the one of before, or any free."""
    lock_fd = claim(directory)
    try:
        ports = settle_ports(directory, port)
        properties = _write_properties(directory, ports)
        jvm = [str(java), *_JVM, f"-Dlog4j2.configurationFile={(_HERE / 'log4j2.properties').as_uri()}"]
        jvm += ["-Djava.awt.headless=true", f"-Dkafka.logs.dir={directory / 'log'}"]
        # Named one by one: another file in that directory stays out.
        jvm += ["-cp", os.pathsep.join(str(jars / jar.file_name) for jar in locked_jars())]
        environ = {
            **os.environ,
            "LC_ALL": "C.UTF-8",
        }  # under LC_ALL=C Java cannot open a path that is not ASCII
        if not (directory / "log" / "meta.properties").exists():  # the last file that formatting writes
            _format(jvm, properties, environ)
        return Launch([*jvm, "kafka.Kafka", str(properties)], environ, ports, lock_fd)
    except BaseException:
        os.close(lock_fd)
        raise


def reserve(directory: Path, port: int) -> Ports:
    """Settle the ports ahead of a start by another process (`python -m stack.broker`)."""
    lock_fd = claim(directory)
    try:
        return settle_ports(directory, port)
    finally:
        os.close(lock_fd)


def claim(directory: Path) -> int:
    """An open, locked file descriptor; ConfigError if a running broker holds the directory."""
    if "," in str(directory):
        raise ConfigError(
            f"{directory}: Kafka takes a comma for the end of a path.", directory=str(directory)
        )
    directory.mkdir(parents=True, exist_ok=True)
    lock_fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        raise ConfigError(
            f"The data directory {directory} is in use by a running broker. Stop it or name another.",
            directory=str(directory),
        ) from None
    return lock_fd


def settle_ports(directory: Path, port: int) -> Ports:
    """The ports of this start, remembered for the next. ConfigError if another program has the port."""
    memory = directory / "ports.json"
    before = _read_ports(memory)
    broker = port or (before.broker if before else _free_port())
    if not 0 < broker < 65_536:
        raise ConfigError(f"{broker} is not a port.", port=broker)
    if not _is_free(broker):
        raise ConfigError(f"Port {broker} of 127.0.0.1 is in use by another program.", port=broker)
    controller = before.controller if before else 0
    if controller in (0, broker) or not _is_free(controller):
        controller = _free_port(but_not=broker)
    ports = Ports(broker, controller)
    if ports != before:
        fresh = memory.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(ports)) + "\n")
        fresh.replace(memory)
    return ports


def _read_ports(memory: Path) -> Ports | None:
    try:
        return Ports(**json.loads(memory.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{memory} is damaged ({error}); delete it and name the port.", path=str(memory)
        ) from error


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Java does: TIME_WAIT is no hindrance
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _free_port(but_not: int = 0) -> int:
    # System randomness: a seeded `random` would send every broker of a seeded program to the same port.
    for port in random.SystemRandom().sample(_PORTS, 200):
        if port != but_not and _is_free(port):
            return port
    raise ConfigError(f"No free port among {_PORTS.start} to {_PORTS.stop - 1}; name one.")


def _write_properties(directory: Path, ports: Ports) -> Path:
    template = string.Template((_HERE / "server.properties.tmpl").read_text())
    path = directory / "server.properties"
    path.write_text(
        template.substitute(
            port=ports.broker,
            controller_port=ports.controller,
            log_dir=_java_property(str((directory / "log").absolute())),
        )
    )
    return path


def _java_property(value: str) -> str:
    r"""Escape as java.util.Properties reads it: Latin-1, so that all beyond ASCII becomes \uXXXX (UTF-16)."""
    escaped = value.replace("\\", "\\\\")
    units = escaped.encode("utf-16-be")
    codes = (int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2))
    return "".join(chr(code) if code < 128 else f"\\u{code:04x}" for code in codes)


def _format(jvm: list[str], properties: Path, environ: dict[str, str]) -> None:
    """Write Kafka's metadata into an empty directory (about 2 s, once). Safe to repeat after a crash."""
    cluster_id = (
        "A" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
    )  # 16 bytes; never starts with "-"
    tool = ["kafka.tools.StorageTool", "format", "--standalone", "--ignore-formatted"]
    done = subprocess.run(
        [*jvm, *tool, "-t", cluster_id, "-c", str(properties)],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-2000:]
        raise TransportError(
            f"Kafka's data directory {properties.parent} could not be formatted:\n{said}",
            directory=str(properties.parent),
            exit_status=done.returncode,
        )
