"""Clients that take their time to send a request: the connection is closed, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from proxy_rig import PATIENCE_S, Proxy, running_proxy, settings_for, until
from scripted_engine import ScriptedEngine

pytestmark = pytest.mark.broker

SEND_S = 0.3
BODY = json.dumps({"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}).encode()
HEAD = b"POST /generate HTTP/1.1\r\nhost: p\r\ncontent-length: %d\r\n\r\n" % len(BODY)


@pytest_asyncio.fixture
async def proxy(broker: str, tmp_path: Path, engine: ScriptedEngine) -> AsyncIterator[Proxy]:
    settings = settings_for(broker, tmp_path, [engine.url], proxy={"client_send_s": SEND_S})
    async with running_proxy(settings) as running:
        yield running


async def connect(proxy: Proxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = proxy.base.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    """A byte at a time, each well within the patience, all of them beyond it."""
    for place in range(len(data)):
        writer.write(data[place : place + 1])
        await asyncio.sleep(SEND_S / 10)
        if writer.is_closing():
            return


async def rest(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(), PATIENCE_S)


@pytest.mark.parametrize(
    "beginning",
    [b"", b"P", b"POST /generate HTTP/1.1\r\nhost: p\r\n", HEAD, HEAD + BODY[:9]],
    ids=["nothing", "a byte", "half a head", "a head", "half a body"],
)
async def test_a_request_that_does_not_come_is_not_waited_for(proxy: Proxy, beginning: bytes) -> None:
    reader, writer = await connect(proxy)
    writer.write(beginning)
    assert (await rest(reader)).startswith(b"HTTP/1.1 408 " if beginning else b"")
    await until(lambda: len(proxy.connections()) == 0, "the connection's end")
    writer.close()
    assert proxy.parts.limits.inflight == 0
    assert (await proxy.post("/generate", json.loads(BODY)))[0] == 200


async def test_a_byte_now_and_then_is_not_enough(proxy: Proxy) -> None:
    for slow in (HEAD, BODY):
        reader, writer = await connect(proxy)
        if slow is BODY:
            writer.write(HEAD)
        dripping = asyncio.ensure_future(drip(writer, slow[:-1]))
        assert (await rest(reader)).startswith(b"HTTP/1.1 408 ")
        dripping.cancel()
        writer.close()


async def test_empty_lines_between_requests_are_no_request(proxy: Proxy) -> None:
    reader, writer = await connect(proxy)
    writer.write(HEAD + BODY)
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    writer.write(b"\r\n")
    assert b"output_ids" in await rest(reader)
    writer.close()


async def test_an_answer_may_take_longer_than_its_request(proxy: Proxy, engine: ScriptedEngine) -> None:
    engine.held_at = 1
    reader, writer = await connect(proxy)
    writer.write(HEAD + BODY + HEAD[:9])  # and the next request has begun
    await until(lambda: engine.holds, "the engine to hold it")
    await asyncio.sleep(5 * SEND_S)
    assert not reader.at_eof()
    engine.go.set()
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_an_idle_connection_is_closed(broker: str, tmp_path: Path, engine: ScriptedEngine) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    async with running_proxy(settings, keep_alive_s=1) as proxy:
        reader, writer = await connect(proxy)
        writer.write(HEAD + BODY)
        assert (await rest(reader)).startswith(b"HTTP/1.1 200 ")
        writer.close()
