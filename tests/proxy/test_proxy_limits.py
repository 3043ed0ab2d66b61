"""What the proxy takes on, and what it refuses: in flight, headers, sessions that are over; each with a clear answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from proxy_rig import Proxy, log_of, running_proxy, settings_for, until
from scripted_engine import ScriptedEngine

from proxy.bounded_http import MAX_HEAD_BYTES
from schemas.events import SessionClaimed, TrajectoryEnded
from schemas.topics import SEGMENTS

pytestmark = pytest.mark.broker

BODY: dict[str, Any] = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}


async def test_one_session_cannot_take_all_places(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    engine.held_at = 1
    settings = settings_for(broker, tmp_path, [engine.url], proxy={"max_session_inflight": 2})
    async with running_proxy(settings) as proxy:
        busy, other = await proxy.open(), await proxy.open(sample=1)
        calls = [asyncio.ensure_future(proxy.generate(busy, [1])) for _ in range(2)]
        await until(lambda: len(engine.running) == 2, "both engine calls")
        async with proxy.http.post(busy["base_url"] + "/generate", json=BODY) as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (429, "1")
            assert (await reply.json())["error"]["limit"] == "proxy.max_session_inflight"
        calls.append(asyncio.ensure_future(proxy.generate(other, [1])))
        await until(lambda: len(engine.running) == 3, "the other session's call")
        engine.go.set()
        assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 3
        assert (await proxy.generate(busy, [1]))[0] == 200


HEADERS: list[tuple[str, str]] = [
    ("X-Hoofprint-Attempt", "1" * 5000),
    ("X-Hoofprint-Attempt", "-1"),
    ("X-Hoofprint-Attempt", "1.5"),
    ("X-Hoofprint-Attempt", "²"),
    ("X-Hoofprint-Attempt", str(2**31)),
    ("X-Hoofprint-Sample-Index", "9" * 11),
    ("X-Session-Id", "s" * 257),
    ("X-Session-Id", "s\t1"),
    ("X-Session-Id", "sé"),
    ("X-SMG-Routing-Key", "r" * 2000),
    ("X-Instance-Id", "i" * 257),
    ("X-Turn-Id", "t" * 2000),
    ("Authorization", "Bearer " + "k" * 10_000),
    ("X-Api-Key", "k" * 10_000),
]


@pytest.mark.parametrize(("name", "value"), HEADERS)
async def test_a_header_that_is_too_long_or_odd_is_refused_by_name(
    broker: str, tmp_path: Path, engine: ScriptedEngine, name: str, value: str
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    headers = {
        "X-Session-Id": "s",
        "X-Instance-Id": "g",
        "X-Hoofprint-Attempt": "0",
        "X-Hoofprint-Sample-Index": "0",
    }
    if name == "X-SMG-Routing-Key":
        del headers["X-Session-Id"]
    async with running_proxy(settings) as proxy:
        async with proxy.http.post(
            proxy.base + "/generate", json=BODY, headers=headers | {name: value}
        ) as reply:
            assert reply.status == 400
            error = (await reply.json())["error"]
        assert error["code"] == "invalid_request"
        assert error["param"].replace("_", "-") in (name.lower(), name.lower().removeprefix("x-"))
        assert not any(session.next_index for session in proxy.parts.table.open.values())
    assert not engine.bodies


async def test_the_head_of_a_request_is_bounded(broker: str, tmp_path: Path, engine: ScriptedEngine) -> None:
    settings = settings_for(broker, tmp_path, [engine.url], proxy={"max_header_bytes": 4000})
    async with running_proxy(settings) as proxy:
        async with proxy.http.post(
            proxy.base + "/generate", json=BODY, headers={"X-Any": "a" * 4000}
        ) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (431, "headers_too_large")
        host, port = proxy.base.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /generate HTTP/1.1\r\n")
        sent = 0
        while sent < 100 * MAX_HEAD_BYTES and not reader.at_eof():  # a head that never ends
            writer.write(b"x-a: " + b"a" * 8000 + b"\r\n")
            sent += 8000
            try:
                await writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(0)
        assert sent < 100 * MAX_HEAD_BYTES
        writer.close()
        assert (await proxy.post("/generate", BODY))[0] == 200


async def test_an_expired_session_is_gone_for_every_proxy(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url])
    header = {"X-Session-Id": "named"}
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        await proxy.generate(opened, [1])
        await proxy.post("/generate", BODY, **header)
        for session in proxy.parts.table.open.values():
            session.used_at = 0
        await until(lambda: not proxy.parts.table.open, "the expiry")
        await check_gone(proxy, opened, header)
        proxy.parts.table.ended.clear()  # so many others have ended since
        await check_gone(proxy, opened, header)
    async with running_proxy(settings) as successor:
        await check_gone(successor, opened, header)
        assert (await successor.post("/session/finalize", {"session_id": "named"}))[0] == 410
        status, reply = await successor.post("/sessions", {"kind": "free", "session_id": "named"})
        assert (status, reply["error"]["code"]) == (410, "trajectory_gone")
        assert not successor.parts.table.open
    ends = await asyncio.to_thread(log_of, settings, SEGMENTS, TrajectoryEnded)
    assert sorted(end.end.reason for end in ends) == ["expired", "expired"]
    claims = await asyncio.to_thread(log_of, settings, SEGMENTS, SessionClaimed)
    assert sum(claim.restart for claim in claims) == 1


async def check_gone(proxy: Proxy, opened: dict[str, Any], header: dict[str, str]) -> None:
    for path, headers in ((f"/s/{opened['token']}/generate", {}), ("/generate", header)):
        for _ in range(2):
            status, reply = await proxy.post(path, BODY, **headers)
            assert (status, reply["error"]["code"], reply["error"]["reason"]) == (
                410,
                "trajectory_gone",
                "expired",
            )


async def test_a_group_to_train_on_has_no_sample_beyond_its_size(
    broker: str, tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = settings_for(broker, tmp_path, [engine.url], group={"size": 4})
    rollout = {"X-Session-Id": "s", "X-Instance-Id": "g", "X-Hoofprint-Attempt": "0"}
    async with running_proxy(settings) as proxy:
        for sample, kind, expected in ((3, "train", 200), (4, "train", 400), (4, "eval", 200)):
            body = {"kind": kind, "group_id": "g", "attempt": 0, "sample_index": sample}
            status, reply = await proxy.post("/sessions", body)
            assert status == expected, reply
            if expected == 400:
                assert (reply["error"]["param"], reply["error"]["group_size"]) == ("sample_index", 4)
        status, reply = await proxy.post("/generate", BODY, **rollout, **{"X-Hoofprint-Sample-Index": "4"})
        assert (status, reply["error"]["param"]) == (400, "x-hoofprint-sample-index")
        assert not engine.bodies
        status, _ = await proxy.post("/generate", BODY, **rollout, **{"X-Hoofprint-Sample-Index": "3"})
        assert status == 200
