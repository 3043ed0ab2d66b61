"""The few calls of the engines' contract that their tests make."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from proxy.engine_stream import ChunkReader


class Running:
    """A streamed request that is under way, read as the proxy reads it. `done`: the finished `reader`."""

    def __init__(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        self.reader = ChunkReader(None)
        self._session = session
        self._body = body
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async with self._session.post("/generate", json=self._body) as reply:
                assert reply.status == 200, await reply.text()
                async for data in reply.content.iter_any():
                    self.reader.feed(data)
                    self.reader.settle()
                    self._news.set()
        finally:
            self._news.set()

    async def until_tokens(self, count: int) -> None:
        """Wait until so many tokens have come."""
        while self.reader.count < count:
            if self._task.done():
                await self._task
                raise AssertionError(f"ended before it had {count} tokens: {self.reader.finish}")
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 30)

    async def done(self) -> ChunkReader:
        """Wait for the end."""
        await asyncio.wait_for(self._task, 60)
        assert self.reader.done
        return self.reader

    async def leave(self) -> None:
        """Close the connection, as a client that has died."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Client:
    """One connection pool to one engine."""

    def __init__(self, base_url: str) -> None:
        self._session = aiohttp.ClientSession(base_url, connector=aiohttp.TCPConnector(limit=0))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and decoded body (text when it is not JSON)."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        headers = {"Content-Type": "application/json"}
        async with self._session.post(path, data=data, headers=headers) as reply:
            return reply.status, await _decoded(reply)

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(path) as reply:
            return reply.status, await _decoded(reply)

    async def generate(self, input_ids: list[int], rid: str | None = None, **sampling: Any) -> Any:
        """A finished answer with log-probs."""
        body: dict[str, Any] = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True}
        status, answer = await self.post("/generate", body | ({"rid": rid} if rid else {}))
        assert status == 200, answer
        return answer

    def begin(self, input_ids: list[int], rid: str, **sampling: Any) -> Running:
        """A streamed request in the background."""
        body = {"input_ids": input_ids, "rid": rid, "sampling_params": sampling, "return_logprob": True}
        return Running(self._session, body | {"stream": True})

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        """Chunks of a streamed answer; `[DONE]` ends it."""
        async with self._session.post("/generate", json=body | {"stream": True}) as reply:
            assert reply.status == 200
            async for line in reply.content:
                if line.strip() == b"data: [DONE]":
                    return
                if line.strip():
                    yield orjson.loads(line.removeprefix(b"data: "))

    async def pause(self, mode: str) -> None:
        answer = await self.post("/pause_generation", {"mode": mode})
        assert answer == (200, {"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self) -> None:
        answer = await self.post("/continue_generation", {})
        assert answer == (200, {"message": "Generation continued successfully.", "status": "ok"})

    async def update(self, path: Path, version: str, **more: Any) -> None:
        """New weights, which must be taken."""
        status, answer = await self.try_update(path, version, **more)
        assert (status, answer["success"]) == (200, True), answer

    async def try_update(self, path: Path, version: str, **more: Any) -> tuple[int, Any]:
        body = {"model_path": str(path), "weight_version": version, **more}
        return await self.post("/update_weights_from_disk", body)

    async def version(self) -> str:
        return str((await self.get("/model_info"))[1]["weight_version"])

    async def until_idle(self) -> None:
        """Unpaused, with nothing running or waiting."""
        await self.resume()
        await self.post("/abort_request", {"abort_all": True})
        await self.until_load(lambda load: load["num_running_reqs"] == load["num_waiting_reqs"] == 0)
        deadline = time.monotonic() + 20
        while (await self.post("/flush_cache", {}))[0] != 200:  # a cut request is let go a little later
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    async def until_load(self, condition: Callable[[dict[str, int]], bool], deadline_s: float = 20.0) -> None:
        """Wait until the engine's counts satisfy `condition`."""
        deadline = time.monotonic() + deadline_s
        while not condition((await self.get("/v1/loads"))[1]["loads"][0]):
            assert time.monotonic() < deadline, "the engine did not get there"
            await asyncio.sleep(0.005)

    async def until_tokens(self, more: int) -> None:
        """Wait for `more` steps of the CPU engine from now on."""
        start = (await self.get("/v1/loads"))[1]["loads"][0]["num_steps"]
        await self.until_load(lambda load: load["num_steps"] >= start + more)


async def _decoded(reply: aiohttp.ClientResponse) -> Any:
    raw = await reply.read()
    return orjson.loads(raw) if reply.content_type == "application/json" and raw else raw.decode()
