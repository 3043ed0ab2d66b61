"""Engines over HTTP, for operators: who is there, and taking one out without losing what it runs.

A drained engine gets no new generation, sessions that were at it go on elsewhere, and what it runs may end; what still runs
after the time is aborted and resumes at another engine with its tokens. It stays out, updates leave it alone, until it is
undrained; then it gets the current weights first. A restarted proxy knows its drains (`drains.py`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from proxy.api_fields import DRAIN
from proxy.asgi import Call
from proxy.catch_up import CatchUp
from proxy.drains import Drains
from proxy.engines import Engine
from proxy.generation import Generation
from proxy.generation_control import GenerationController
from proxy.policy_api import seconds_of
from proxy.quiesce import quiesce
from proxy.registry import EngineRegistry
from proxy.session_access import SessionAccess
from schemas.errors import LastEngine, UnknownEngine

_DRAIN_S = 60.0


class EnginesApi:
    """`GET /v1/engines`, `POST /v1/engines/{engine_id}/drain`, `…/undrain`: the admin's."""

    def __init__(
        self, access: SessionAccess, registry: EngineRegistry, catch_up: CatchUp, controller: GenerationController,
        drains: Drains, max_body_bytes: int, abort_s: float,
    ) -> None:  # fmt: skip
        self._access = access
        self._registry = registry
        self._catch_up = catch_up
        self._controller = controller
        self._drains = drains
        self._max_body = max_body_bytes
        self._abort_s = abort_s

    async def engines(self, call: Call) -> None:
        """Every engine, its state, and what it runs."""
        self._access.check_admin(call)
        await call.reply({"engines": [self._facts(engine) for engine in self._registry.engines]})

    async def drain(self, call: Call) -> None:
        """`{timeout_seconds?, force?}`. Returns when nothing runs there any more. LastEngine: no other could take over,
        unless forced. StoreError: it is not drained, because a restarted proxy would not know."""
        self._access.check_admin(call)
        engine = self._named(call)
        body = await call.json(self._max_body)
        DRAIN.check(body)
        timeout_s = seconds_of(body, _DRAIN_S)
        if not body.get("force") and not any(other is not engine for other in self._registry.usable):
            raise LastEngine("no other engine could take over", engine=engine.engine_id)
        await asyncio.to_thread(self._drains.keep, engine.engine_id, drained=True)
        engine.draining = True
        aborted = await self._empty(engine, timeout_s)
        await call.reply({**self._facts(engine), "aborted": aborted})

    async def _empty(self, engine: Engine, timeout_s: float) -> list[str]:
        """Let its calls end, then end them; the ids of the latter. An undrain in the meantime ends this, too."""

        def concerned(generation: Generation) -> bool:
            return engine.draining and generation.engine is engine

        aborted = list(await quiesce(self._controller, timeout_s, concerned, abort=False))
        if aborted and await quiesce(self._controller, self._abort_s, concerned):
            engine.cut()
            await quiesce(self._controller, self._abort_s, concerned, abort=False)
        return aborted

    async def undrain(self, call: Call) -> None:
        """Back into the rotation; one that is behind gets the current weights first, in the background."""
        self._access.check_admin(call)
        engine = self._named(call)
        await asyncio.to_thread(self._drains.keep, engine.engine_id, drained=False)
        engine.draining = False
        await call.reply(self._facts(engine))

    def _named(self, call: Call) -> Engine:
        name = call.path_params["engine_id"]
        engine = self._registry.find(name)
        if engine is None:
            known = [one.engine_id for one in self._registry.engines]
            raise UnknownEngine("no engine has this id", engine=name[:200], known=known)
        return engine

    def _facts(self, engine: Engine) -> dict[str, Any]:
        sessions = self._access.table.open.values()
        running = {rid: g for rid, g in self._controller.running.items() if g.engine is engine}
        return {
            "engine_id": engine.engine_id,
            "state": self._registry.state(engine),
            "version": engine.version,
            "inflight": engine.inflight,
            "sessions": sum(session.engine == engine.engine_id for session in sessions),
            "running": [
                {
                    "rid": rid,
                    "session_id": generation.session.identity.session_id,
                    "output_tokens": len(generation.output_ids),
                }
                for rid, generation in running.items()
            ],
            "catch_up_failures": self._catch_up.backoff[engine.engine_id].failures,
        }
