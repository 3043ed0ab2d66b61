"""Addresses of a run's processes: chosen once, before anything starts, so that a restarted child has the same one."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

from schemas.errors import ConfigError

# Below the range from which systems take source ports: a client that keeps knocking while a child restarts could
# otherwise be given that very port, connect to itself, and keep the child from coming back.
_PORTS = range(20_000, 32_768)
_PROBE_S = 3.0


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether nobody listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


class PortBook:
    """The ports of a run directory by name, the same at every start where they are still free."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
        self._chosen: dict[str, int] = {}

    def port(self, name: str, wanted: int = 0) -> int:
        """`wanted` 0: the one of before, or a free one. ConfigError: another program has the wanted one."""
        port = wanted or self._before.get(name, 0)
        if wanted and not is_free(wanted):
            raise ConfigError(
                f"port {wanted} for {name} is in use by another program", name=name, port=wanted
            )
        if not port or port in self._chosen.values() or not is_free(port):
            port = self._free()
        self._chosen[name] = port
        self._path.write_text(json.dumps(self._chosen) + "\n")
        return port

    def _free(self) -> int:
        for port in random.SystemRandom().sample(_PORTS, 200):
            if port not in self._chosen.values() and is_free(port):
                return port
        raise ConfigError(f"no free port among {_PORTS.start} to {_PORTS.stop - 1}")


def answers(url: str) -> Callable[[], Awaitable[bool]]:
    """A readiness probe: GET answers 200."""

    async def probe() -> bool:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PROBE_S)) as http,
                http.get(url) as reply,
            ):
                return reply.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    return probe
