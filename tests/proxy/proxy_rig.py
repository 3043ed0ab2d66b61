"""The proxy in the test's own event loop, on a real broker, in front of scripted engines; and its log, read back."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

from journal.clock import system_clock
from journal.event_log import read_events
from journal.reader import TopicReader
from proxy.app import build_app
from proxy.parts import Parts
from proxy.patient_http import patient
from schemas.errors import HoofprintError
from schemas.events import Event
from schemas.settings import Settings
from schemas.topics import Topic

PATIENCE_S = 20.0
PREFIX = "proxytests"


def settings_for(broker: str, directory: Path, engines: list[str], **sections: dict[str, Any]) -> Settings:
    """A run of its own at the shared broker."""
    tree: dict[str, Any] = {
        "run": {"run_id": f"run-{uuid.uuid4().hex[:10]}", "directory": str(directory)},
        "kafka": {"bootstrap_servers": broker, "topic_prefix": PREFIX},
        "group": {"size": 64},
        "proxy": {"engines": engines},
    }
    for name, values in sections.items():
        tree.setdefault(name, {}).update(values)
    return Settings.model_validate(tree)


async def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll with a deadline."""
    for _ in range(int(PATIENCE_S / 0.01)):
        found = condition()
        if found:
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"waited in vain for: {what}")


class Proxy:
    """One proxy under test and a client of it."""

    def __init__(
        self, parts: Parts, base: str, http: aiohttp.ClientSession, connections: Callable[[], set[Any]] = set
    ) -> None:
        self.parts = parts
        self.connections = connections
        self.base = base
        self.http = http

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        url = path if path.startswith("http") else self.base + path
        async with self.http.post(url, json=body, headers=headers) as reply:
            return reply.status, await reply.json()

    async def open(self, group: str = "g0", sample: int = 0, **more: Any) -> dict[str, Any]:
        body = {
            "kind": "train",
            "group_id": group,
            "attempt": 0,
            "sample_index": sample,
            "restart": True,
            **more,
        }
        status, opened = await self.post("/sessions", body)
        assert status == 200, opened
        return opened

    async def generate(
        self, opened: dict[str, Any], ids: list[int], tokens: int = 5, **more: Any
    ) -> tuple[int, dict[str, Any]]:
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": tokens}, **more}
        return await self.post(opened["base_url"] + "/generate", body)


@contextlib.asynccontextmanager
async def running_proxy(
    settings: Settings, send_buffer: int = 0, keep_alive_s: int = 5
) -> AsyncIterator[Proxy]:
    """`send_buffer`: bytes that the kernel takes of an answer that nobody reads."""
    failures: list[HoofprintError] = []
    app = build_app(settings, system_clock, failures.append)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, http=patient(settings.proxy.client_send_s), lifespan="on", log_config=None,
        access_log=False, timeout_graceful_shutdown=3, timeout_keep_alive=keep_alive_s,
    )  # fmt: skip
    server = uvicorn.Server(config)
    port = socket.socket()
    if send_buffer:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port.bind(("127.0.0.1", 0))
    serving = asyncio.ensure_future(server._serve([port]))
    await until(lambda: server.started or serving.done(), "the server")
    base = f"http://127.0.0.1:{port.getsockname()[1]}"
    parts: Parts = app.state.parts
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        try:
            await until(lambda: parts.control.ready and parts.registry.usable, "readiness")
            yield Proxy(parts, base, http, lambda: server.server_state.connections)
        finally:
            server.should_exit = True
            await serving


def log_of(settings: Settings, topic: Topic, event_type: type[Event] | None = None) -> list[Any]:
    """Events of the run in a topic, in log order per partition."""
    reader = TopicReader(settings.kafka, [topic])
    try:
        events = [event for _, event in read_events(reader.read_to_end())]
    finally:
        reader.close()
    mine = [e for e in events if e.run_id == settings.run.run_id]
    return [e for e in mine if event_type is None or isinstance(e, event_type)]
