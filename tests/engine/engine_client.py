"""The few calls of the contract that the engine's tests make."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import orjson


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
        async with self._session.post(
            path, data=body if isinstance(body, bytes) else orjson.dumps(body)
        ) as reply:
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

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        """Chunks of a streamed answer; `[DONE]` ends it."""
        async with self._session.post("/generate", json=body | {"stream": True}) as reply:
            assert reply.status == 200
            async for line in reply.content:
                if line.strip() == b"data: [DONE]":
                    return
                if line.strip():
                    yield orjson.loads(line.removeprefix(b"data: "))

    async def until_load(self, condition: Callable[[dict[str, int]], bool], deadline_s: float = 20.0) -> None:
        """Wait until the engine's counts satisfy `condition`."""
        deadline = time.monotonic() + deadline_s
        while not condition((await self.get("/v1/loads"))[1]["loads"][0]):
            assert time.monotonic() < deadline, "the engine did not get there"
            await asyncio.sleep(0.005)

    async def until_tokens(self, more: int) -> None:
        """Wait for `more` steps of the engine from now on."""
        start = (await self.get("/v1/loads"))[1]["loads"][0]["num_steps"]
        await self.until_load(lambda load: load["num_steps"] >= start + more)


async def _decoded(reply: aiohttp.ClientResponse) -> Any:
    raw = await reply.read()
    return orjson.loads(raw) if reply.content_type == "application/json" else raw.decode()
