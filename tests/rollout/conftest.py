"""`answering_proxy`: an HTTP peer that speaks the proxy's contract as far as the client needs it, and can misbehave."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import pytest
from aiohttp import web


class AnsweringProxy:
    """Opens, answers `[1, 2, 3]` and finalizes. `misbehave`: (path ending, status, code), each used once."""

    def __init__(self) -> None:
        self.url = ""
        self.calls: Counter[str] = Counter()
        self.opened: list[dict[str, object]] = []
        self.finalized: list[dict[str, object]] = []
        self.misbehave: list[tuple[str, int, str]] = []
        self.closed_groups: set[str] = set()

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        ending = request.path.rsplit("/", 1)[-1]
        self.calls[ending] += 1
        for rule in self.misbehave:
            if rule[0] == ending:
                self.misbehave.remove(rule)
                return problem(rule[1], rule[2])
        return getattr(self, f"_{ending}")(body)

    def _sessions(self, body: dict[str, object]) -> web.Response:
        if body["group_id"] in self.closed_groups:
            return problem(410, "trajectory_gone")
        self.opened.append(body)
        name = f"t-{body['group_id']}-{body['attempt']}-{body['sample_index']}"
        return web.json_response(
            {
                "session_id": name,
                "parent_traj_id": name,
                "token": name,
                "base_url": f"{self.url}/s/{name}",
                "headers": {},
            }
        )

    def _generate(self, body: dict[str, object]) -> web.Response:
        place = {"parent_traj_id": "t", "segment_index": self.calls["generate"] - 1}
        meta = {"finish_reason": {"type": "stop"}, "hoofprint": place}
        if body["return_logprob"]:
            meta["output_token_logprobs"] = [[-0.5, 1, None], [-0.25, 2, None], [-1.0, 3, None]]
        return web.json_response({"output_ids": [1, 2, 3], "meta_info": meta})

    def _finalize(self, body: dict[str, object]) -> web.Response:
        self.finalized.append(body)
        return web.json_response({})


def problem(status: int, code: str) -> web.Response:
    return web.json_response({"error": {"code": code, "message": f"this is {code}"}}, status=status)


@pytest.fixture
async def answering_proxy() -> AsyncIterator[AnsweringProxy]:
    double = AnsweringProxy()
    app = web.Application()
    app.router.add_post("/{path:.*}", double.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    double.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield double
    await runner.cleanup()
