"""Clients that go away, or do not read, at every point of a call on every API: nothing of them stays in any table."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from api_calls import APIS, CASES, Api
from chat_rig import always_says, api_settings, segments, write_tokenizer
from proxy_rig import Proxy, running_proxy, until
from scripted_engine import ScriptedEngine

from journal.producer import Position
from schemas.events import Event, TokenSegment
from schemas.settings import Settings

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest_asyncio.fixture
async def rig(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> AsyncIterator[tuple[Proxy, Settings]]:
    engine.tokens = always_says("well well well")
    settings = api_settings(broker, tmp_path, engine, checkpoint, client_stall_s=1.0)
    async with running_proxy(settings, send_buffer=4096) as proxy:
        yield proxy, settings


class RudeClient:
    """A socket that has sent one whole request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    def vanish(self) -> None:
        self._writer.transport.abort()


async def send(proxy: Proxy, opened: dict[str, Any], path: str, body: Any, receive: int = 0) -> RudeClient:
    """`receive`: bytes that its socket takes while nobody reads."""
    host, port = proxy.base.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    plug = socket.socket()
    if receive:
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    plug.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plug, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=plug, limit=1024)
    head = f"POST /s/{opened['token']}{path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    await writer.drain()
    return RudeClient(reader, writer)


async def nothing_is_left(proxy: Proxy, opened: dict[str, Any], engine: ScriptedEngine) -> None:
    parts = proxy.parts
    session = parts.table.open[opened["session_id"]]
    tables: list[tuple[str, Callable[[], Any]]] = [
        ("requests in flight", lambda: parts.limits.inflight),
        ("generations of the session", lambda: session.busy),
        ("engine calls", lambda: parts.policy._controller.running),
        ("engine calls, as the engines count", lambda: sum(e.inflight for e in parts.registry.engines)),
        ("waiting at the gate", lambda: parts.gate.waiting),
        ("the session's lock", session.writing.locked),
        ("claims under way", lambda: parts.access._turnstiles),
        ("the engine's requests", lambda: engine.running),
        ("records under way", lambda: parts.recorder._tasks),
    ]
    for what, table in tables:
        await until(lambda table=table: not table(), f"an end of: {what}")  # type: ignore[misc]


async def goes_on(proxy: Proxy, settings: Settings, opened: dict[str, Any], api: Api, recorded: int) -> None:
    """The same request is served, and the log has so many segments of the session then."""
    status, reply = await proxy.post(opened["base_url"] + api.path, api.request(stream=False))
    assert status == 200, reply
    mine = [s for s in await segments(settings) if s.session_id == opened["session_id"]]
    assert [s.segment_index for s in mine] == list(range(recorded)), api.name
    assert len({s.request_digest for s in mine}) == 1


async def test_gone_before_the_gate_opens(rig: tuple[Proxy, Settings], engine: ScriptedEngine) -> None:
    proxy, settings = rig
    for number, (api, stream) in enumerate(CASES):
        opened = await proxy.open(sample=number)
        proxy.parts.gate.close("test")
        called = len(engine.bodies)
        client = await send(proxy, opened, api.path, api.request(stream=stream))
        await until(lambda: proxy.parts.gate.waiting, "the gate")
        client.vanish()
        await nothing_is_left(proxy, opened, engine)
        proxy.parts.gate.open("test")
        assert len(engine.bodies) == called
        await goes_on(proxy, settings, opened, api, 1)


async def test_gone_while_the_engine_works(rig: tuple[Proxy, Settings], engine: ScriptedEngine) -> None:
    proxy, settings = rig
    for number, (api, stream) in enumerate(CASES):
        opened = await proxy.open(sample=number)
        engine.held_at, engine.holds = 3, 0
        client = await send(proxy, opened, api.path, api.request(stream=stream))
        await until(lambda: engine.holds, "the engine call")
        (rid,) = engine.running
        client.vanish()
        await nothing_is_left(proxy, opened, engine)
        await until(lambda rid=rid: rid in engine.aborted, "the abort")  # type: ignore[misc]
        engine.held_at = None
        await goes_on(proxy, settings, opened, api, 1)


async def test_gone_while_the_record_is_on_its_way(
    rig: tuple[Proxy, Settings], engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, settings = rig
    publish, sent, land = proxy.parts.producer.apublish, asyncio.Event(), asyncio.Event()

    async def late(event: Event) -> Position:
        if isinstance(event, TokenSegment):
            sent.set()
            await land.wait()
        return await publish(event)

    monkeypatch.setattr(proxy.parts.producer, "apublish", late)
    for number, (api, stream) in enumerate(CASES):
        opened = await proxy.open(sample=number)
        sent.clear()
        land.clear()
        client = await send(proxy, opened, api.path, api.request(stream=stream))
        await sent.wait()
        client.vanish()
        await until(lambda: proxy.parts.limits.inflight == 0, "the end of the request")
        land.set()
        await nothing_is_left(proxy, opened, engine)
        # it was handed over, so it is in the log: an abandoned turn, which the same request follows
        await goes_on(proxy, settings, opened, api, 2)


@pytest.mark.parametrize("vanishes", [True, False])
async def test_a_stream_that_nobody_reads(
    rig: tuple[Proxy, Settings], engine: ScriptedEngine, vanishes: bool
) -> None:
    proxy, settings = rig
    other = await proxy.open(sample=len(APIS))
    for number, api in enumerate(APIS):
        opened = await proxy.open(sample=number)
        engine.tokens, engine.delay_s = always_says("well, " * 200), 0.002
        client = await send(proxy, opened, api.path, long_stream(api), receive=2048)
        await until(lambda: engine.running, "the engine call")
        for connection in proxy.connections():
            connection.transport.set_write_buffer_limits(high=1000)
        await until(lambda: stuck(proxy), f"a full buffer: {api.name}")
        engine.tokens, engine.delay_s = always_says("well"), 0.0
        assert (await proxy.generate(other, [1], 3))[0] == 200  # nobody else waits for it
        held = [connection.transport.get_write_buffer_size() for connection in proxy.connections()]
        assert max(held) < 1_000_000
        if vanishes:
            client.vanish()
        await nothing_is_left(proxy, opened, engine)  # else it is cut off after `client_stall_s`
        await until(lambda: not stuck(proxy), "the end of the connection")
        client.vanish()
        await goes_on(proxy, settings, opened, api, 1)


def long_stream(api: Api) -> dict[str, Any]:
    body = api.request(stream=True)
    if api.name == "generate":
        return {**body, "sampling_params": {"max_new_tokens": 2000}, "return_logprob": True}
    return {**body, **{name: 2000 for name in ("max_tokens", "max_output_tokens") if name in body}}


def stuck(proxy: Proxy) -> list[Any]:
    return [connection for connection in proxy.connections() if connection.flow.write_paused]
