"""The proxy as `hoofprint up` starts it, a fake engine, and a client that costs little, all in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson
import psutil

from journal.topic_admin import create_topics
from schemas.settings import load
from stack.models.qwen3_tokenizer import ensure_qwen3_tokenizer

PATIENCE_S = 60.0
TEXT = (
    "The proxy keeps for every token the weights that produced it, and writes what it saw to the log before it answers. "
    "A reader of the log can therefore say how old each token was when the trainer learned from it. "
)


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far, all its threads."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class Stage:
    """Processes that end with it. `proxy`, `engine`: base URLs."""

    def __init__(
        self,
        bootstrap_servers: str,
        directory: Path,
        *,
        token_ms: float,
        incremental: bool = False,
        sets: tuple[str, ...] = (),
    ) -> None:
        directory.mkdir(parents=True)
        self._log = directory / "processes.log"
        self._children: list[subprocess.Popen[bytes]] = []
        self.tokens = _reply_tokens()
        tokens = directory / "tokens.json"
        tokens.write_bytes(orjson.dumps(self.tokens))
        ports = free_port(), free_port()
        self.engine, self.proxy = (f"http://127.0.0.1:{port}" for port in ports)
        mode = "incremental" if incremental else "cumulative"
        self._start(
            ["-m", "benchmarks.proxy.fake_engine", str(ports[0]), str(tokens), str(token_ms), mode],
            self.engine,
        )
        settings = load(
            sets=(
                "run.run_id=bench", f"run.directory={directory}", f"kafka.bootstrap_servers={bootstrap_servers}",
                f"kafka.topic_prefix={directory.name}", f"proxy.port={ports[1]}", f'proxy.engines=["{self.engine}"]',
                f"engine.model={ensure_qwen3_tokenizer()}", *sets,
            )
        )  # fmt: skip
        create_topics(settings.kafka)
        file = directory / "settings.json"
        file.write_text(settings.to_json(), encoding="utf-8")
        self._proxy = self._start(
            ["-m", "stack.cli", "part", "proxy", "--settings", str(file)], self.proxy, "/readyz"
        )

    def _start(self, command: list[str], url: str, path: str = "/model_info") -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        with self._log.open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, *command], stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self._children.append(child)
        self._until(lambda: answers(url + path), child)
        return child

    def _until(self, holds: Callable[[], bool], child: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            if time.monotonic() > deadline or child.poll() is not None:
                raise SystemExit(
                    f"a process did not come up\n{self._log.read_text(errors='replace')[-3000:]}"
                )
            time.sleep(0.05)

    def cpu(self) -> float:
        """CPU seconds of the proxy so far."""
        return cpu_of(self._proxy.pid)

    def memory(self) -> int:
        """Bytes that the proxy alone holds."""
        return int(psutil.Process(self._proxy.pid).memory_full_info().uss)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in reversed(self._children):
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(10)


def answers(url: str) -> bool:
    """Whether there is a 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _reply_tokens() -> list[int]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(ensure_qwen3_tokenizer()), local_files_only=True)
    return list(tokenizer.encode(TEXT * 4, add_special_tokens=False))


class Client:
    """Calls of one benchmark."""

    def __init__(self, stage: Stage, http: aiohttp.ClientSession) -> None:
        self.stage = stage
        self.http = http

    async def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """A reply. SystemExit: not 200."""
        async with self.http.post(url, data=orjson.dumps(body)) as reply:
            raw = await reply.read()
            if reply.status != 200:
                raise SystemExit(f"{url}: {reply.status} {raw[:500]!r}")
            return dict(orjson.loads(raw)) if raw else {}

    async def open(self, name: str) -> str:
        """A session's base URL."""
        body = {"kind": "train", "group_id": name, "attempt": 0, "sample_index": 0, "restart": True}
        return str((await self.post(self.stage.proxy + "/sessions", body))["base_url"])

    async def close(self, base: str) -> None:
        """End a session."""
        await self.post(base + "/session/finalize", {"status": "completed", "reward": 1.0})

    async def frames(self, url: str, body: dict[str, Any]) -> AsyncIterator[tuple[float, bytes]]:
        """Pieces of a stream as they arrive, with the wall-clock time."""
        async with self.http.post(url, data=orjson.dumps(body)) as reply:
            if reply.status != 200:
                raise SystemExit(f"{url}: {reply.status} {(await reply.read())[:500]!r}")
            async for piece, _ in reply.content.iter_chunks():
                yield time.time(), piece


@asynccontextmanager
async def client_of(stage: Stage) -> AsyncIterator[Client]:
    """A client with as many connections as it needs."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as http:
        yield Client(stage, http)


async def at_once(count: int, work: Callable[[int], Any]) -> None:
    """`work(0..count-1)` together."""
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(work(number))
