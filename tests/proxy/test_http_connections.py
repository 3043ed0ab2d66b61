"""Connections as HTTP knows them: several requests before the first answer, and clients of HTTP/1.0."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop
from proxy_rig import PATIENCE_S, Proxy, running_proxy, settings_for, until
from scripted_engine import ScriptedEngine

from proxy.bounded_http import OneWrite

pytestmark = pytest.mark.broker

SEND_S = 0.3


@pytest_asyncio.fixture
async def proxy(broker: str, tmp_path: Path, engine: ScriptedEngine) -> AsyncIterator[Proxy]:
    settings = settings_for(broker, tmp_path, [engine.url], proxy={"client_send_s": SEND_S})
    async with running_proxy(settings) as running:
        yield running


def request(version: str = "1.1", **fields: Any) -> bytes:
    body = json.dumps({"input_ids": [1], "sampling_params": {"max_new_tokens": 3}, **fields}).encode()
    head = f"POST /generate HTTP/{version}\r\nhost: p\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def connect(proxy: Proxy, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = proxy.base.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    return reader, writer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("at_once", [True, False], ids=["one packet", "two packets"])
async def test_who_pipelines_and_goes_leaves_nothing_running(
    proxy: Proxy, engine: ScriptedEngine, stream: bool, at_once: bool
) -> None:
    engine.held_at = 1
    first, second = request(stream=stream), request(stream=stream)
    _, writer = await connect(proxy, first + second if at_once else first)
    await until(lambda: engine.holds, "the engine to hold the first")
    if not at_once:
        writer.write(second)
        await asyncio.sleep(0.1)
    writer.close()
    await until(lambda: proxy.parts.limits.inflight == 0, "the first request's end")
    await until(lambda: not engine.running, "the engine's end of it")
    assert len(proxy.connections()) == 0


async def test_a_request_behind_another_is_not_late(proxy: Proxy, engine: ScriptedEngine) -> None:
    engine.held_at = 1
    reader, writer = await connect(proxy, request() + request()[:-5])
    await until(lambda: engine.holds, "the engine to hold the first")
    await asyncio.sleep(5 * SEND_S)
    engine.go.set()
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in await asyncio.wait_for(reader.read(), PATIENCE_S)  # now it is
    writer.close()


async def test_a_head_without_end_does_not_cut_the_answer_before_it(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    engine.held_at = 1
    reader, writer = await connect(proxy, request(stream=True))
    await until(lambda: engine.holds, "the engine to hold it")
    writer.write(b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000)
    told = await asyncio.wait_for(reader.read(), PATIENCE_S)
    assert b"431" not in told
    writer.close()


async def test_many_requests_in_one_piece_are_answered_in_order(proxy: Proxy) -> None:
    reader, writer = await connect(proxy, b"".join(request(rid=f"r{place}") for place in range(40)))
    for place in range(40):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        answer = json.loads(await asyncio.wait_for(reader.readexactly(size), PATIENCE_S))
        assert answer["meta_info"]["id"] == f"r{place}"
    writer.close()


async def test_a_stream_for_http_1_0_has_no_chunks(proxy: Proxy) -> None:
    reader, writer = await connect(proxy, request("1.0", stream=True))
    head, _, body = (await asyncio.wait_for(reader.read(), PATIENCE_S)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    frames = body.removesuffix(b"\n\n").split(b"\n\n")
    assert frames[-1] == b"data: [DONE]"
    assert len(json.loads(frames[-2].removeprefix(b"data: "))["output_ids"]) == 3
    writer.close()


async def test_an_error_in_a_stream_for_http_1_0_is_its_last_frame(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    engine.held_at = 1
    opened = await proxy.open("group", sample_index=0)
    sent = request("1.0", stream=True).replace(b"/generate", f"/s/{opened['token']}/generate".encode())
    reader, writer = await connect(proxy, sent)
    await asyncio.wait_for(reader.readuntil(b"\n\n"), PATIENCE_S)
    await proxy.post("/session/discard", {"session_id": opened["session_id"]})
    told = await asyncio.wait_for(reader.read(), PATIENCE_S)
    assert told.endswith(b"\n\n")
    assert b"error" in told
    writer.close()


def test_what_was_held_back_for_a_client_that_has_gone_is_dropped() -> None:
    async def answer() -> None:
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[OneWrite] = loop.create_future()

        class Server(asyncio.Protocol):
            def connection_made(self, transport: Any) -> None:
                self.answer = OneWrite(transport)
                self.answer.hold()
                self.answer.write(b"a head")

            def connection_lost(self, exc: Exception | None) -> None:
                gone.set_result(self.answer)

        server = await loop.create_server(Server, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.transport.abort()
        held = await asyncio.wait_for(gone, PATIENCE_S)
        await asyncio.sleep(0)
        held.release()
        assert held.is_closing()
        server.close()

    loop = uvloop.new_event_loop()  # which raises where asyncio only warns
    loop.run_until_complete(answer())
    loop.close()
