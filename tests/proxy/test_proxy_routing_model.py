"""Sessions named in every way there is, ended in every way there is, with restarts between: a small model says what comes."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy_rig import Proxy, log_of, running_proxy, settings_for
from scripted_engine import ScriptedEngine

from proxy.log_fold import SessionLog
from schemas.topics import SEGMENTS

pytestmark = pytest.mark.broker

Way = Literal["path", "bearer", "header", "routing_key", "body"]
WAYS: tuple[Way, ...] = ("path", "bearer", "header", "routing_key", "body")
Act = tuple[str, int, Way]
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["open", "turn", "turn", "turn", "finalize", "expire", "restart"]),
        st.integers(0, 1),
        st.sampled_from(WAYS),
    ),
    min_size=2,
    max_size=9,
)


@dataclass
class Model:
    """One session as its client sees it."""

    name: str
    token: str | None = None
    exists: bool = False
    segments: int = 0
    end: str | None = None
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def over(self) -> int:
        """The status of a call to an ended session."""
        return 410 if self.end == "expired" else 409


@dataclass
class World:
    """Two sessions at one proxy."""

    proxy: Proxy
    sessions: list[Model]

    async def call(
        self, session: Model, way: Way, path: str, body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        """Names the session in one way; without a token, by header."""
        if session.token is None and way in ("path", "bearer"):
            way = "header"
        match way:
            case "path":
                return await self.proxy.post(f"/s/{session.token}{path}", body)
            case "bearer":
                return await self.proxy.post(path, body, Authorization=f"Bearer {session.token}")
            case "header":
                return await self.proxy.post(path, body, **{"X-Session-Id": session.name})
            case "routing_key":
                return await self.proxy.post(path, body, **{"X-SMG-Routing-Key": session.name})
            case "body":
                return await self.proxy.post(path, {**body, "session_id": session.name})

    async def act(self, what: str, session: Model, way: Way) -> None:
        match what:
            case "open":
                await self.open(session)
            case "turn":
                await self.turn(session, way)
            case "finalize":
                await self.finalize(session, way)
            case "expire":
                await self.expire()
            case "restart":  # what a new process knows: nothing
                self.proxy.parts.table.open.clear()
                self.proxy.parts.table.ended.clear()

    async def open(self, session: Model) -> None:
        status, reply = await self.proxy.post("/sessions", {"kind": "free", "session_id": session.name})
        assert status == (session.over if session.end else 200), reply
        if status == 200:
            session.exists, session.token = True, reply["token"]

    async def turn(self, session: Model, way: Way) -> None:
        body = {"input_ids": [session.segments + 1], "sampling_params": {"max_new_tokens": 2}}
        status, reply = await self.call(session, way, "/generate", body)
        if session.end:
            assert status == session.over, reply
            return
        place = reply["meta_info"]["hoofprint"]
        assert (status, place["session_id"], place["segment_index"]) == (200, session.name, session.segments)
        session.exists, session.segments = True, session.segments + 1

    async def finalize(self, session: Model, way: Way) -> None:
        body = {"reward": 1.0 + len(session.answers)}
        status, reply = await self.call(session, way, "/session/finalize", body)
        if session.end == "expired":
            assert status == 410, reply
        elif session.segments == 0:
            assert status in (400, 404), reply
        else:
            session.answers.append(reply)
            session.end = "done"
            assert (status, reply["segment_count"]) == (200, session.segments)
            assert reply == session.answers[0]  # the first answer, however often, here or elsewhere

    async def expire(self) -> None:
        table = self.proxy.parts.table
        mine = [s for s in self.sessions if s.name in table.open]
        for session in mine:
            table.open[session.name].used_at = 0
        await self.proxy.parts.sessions.expire_idle(600.0)
        for session in mine:
            assert session.name not in table.open
            session.end = "expired"


async def test_sessions_do_what_the_model_says(broker: str, tmp_path: Path, engine: ScriptedEngine) -> None:
    configured = settings_for(broker, tmp_path, [engine.url])
    seen: list[Model] = []
    async with running_proxy(configured) as proxy:
        loop = asyncio.get_running_loop()

        async def live(acts: list[Act]) -> None:
            world = World(proxy, [Model(uuid.uuid4().hex) for _ in range(2)])
            seen.extend(world.sessions)
            for what, which, way in acts:
                await world.act(what, world.sessions[which], way)

        @settings(
            max_examples=20, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(ACTS)
        def law(acts: list[Act]) -> None:
            asyncio.run_coroutine_threadsafe(live(acts), loop).result(120)

        await asyncio.to_thread(law)
    logs: dict[str, SessionLog] = {session.name: SessionLog() for session in seen}
    for event in await asyncio.to_thread(log_of, configured, SEGMENTS):
        logs[event.session_id].fold(event)
    for session in seen:
        log = logs[session.name]
        assert sorted(log.segments) == list(range(session.segments))
        assert (log.end.reason if log.end else None) == session.end
    assert any(session.end == "expired" for session in seen)
    assert any(session.answers for session in seen)
