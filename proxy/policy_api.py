"""Versions and pauses over HTTP, for the trainer and for an outer one.

`POST /v1/policy/versions` does a whole update. `/v1/rollout/pause` and `/resume` hold generation while somebody else
updates the engines: running generations are aborted (they resume with what they have) unless mode is `drain`. A pause of
one session holds that session alone, whatever else is paused or resumed, and ends with it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from journal.clock import Clock
from proxy.api_fields import PAUSE, RESUME, VERSIONS
from proxy.asgi import Call
from proxy.control_view import checkpoint_path
from proxy.gate import Gate
from proxy.generation import Generation
from proxy.generation_control import GenerationController
from proxy.quiesce import everything, quiesce
from proxy.registry import EngineRegistry
from proxy.session_access import SessionAccess
from proxy.weight_update import WeightUpdates
from schemas.errors import BadRequest, UnknownSession
from schemas.versions import real_version

REASON = "rollout_pause"
_FORGOTTEN = 1000
"""Paused sessions that another replica has claimed, say, and that never came back: so many names are kept."""


class PolicyApi:
    """The admin's endpoints."""

    def __init__(
        self, access: SessionAccess, updates: WeightUpdates, registry: EngineRegistry, gate: Gate,
        controller: GenerationController, max_body_bytes: int, quiesce_s: float, clock: Clock,
    ) -> None:  # fmt: skip
        self._access = access
        self._updates = updates
        self._registry = registry
        self._gate = gate
        self._controller = controller
        self._max_body = max_body_bytes
        self._quiesce_s = quiesce_s
        self._clock = clock
        self._since: float | None = None
        self._under_way: set[asyncio.Task[Any]] = set()

    async def versions(self, call: Call) -> None:
        """`POST /v1/policy/versions {version, checkpoint_uri, step?, force?}`."""
        self._access.check_admin(call)
        self._access.check_ready()
        body = await call.json(self._max_body)
        VERSIONS.check(body)
        version, checkpoint = label_of(body["version"]), body["checkpoint_uri"].strip()
        step, force = body.get("step"), bool(body.get("force"))
        if not checkpoint:
            raise BadRequest("checkpoint_uri must name a checkpoint", field="checkpoint_uri")
        # the caller may go away: an update that has begun is brought to its end
        work = asyncio.ensure_future(
            self._updates.update(version, checkpoint_path(checkpoint), step, force=force)
        )
        self._under_way.add(work)
        work.add_done_callback(self._under_way.discard)
        await call.reply(msgspec.to_builtins(await asyncio.shield(work)))

    async def stop(self) -> None:
        """End what is under way; no engine stays paused."""
        for work in self._under_way:
            work.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def pause(self, call: Call) -> None:
        """`POST /v1/rollout/pause {reason, mode, timeout_seconds, session_id?}`. UnknownSession."""
        self._access.check_admin(call)
        body = await call.json(self._max_body)
        PAUSE.check(body)
        timeout_s = seconds_of(body, self._quiesce_s)
        mode, session_id = body.get("mode") or "abort", body.get("session_id")
        if session_id is None:
            self._gate.close(REASON)
            self._since = self._since or self._clock() / 1e6
        else:
            self._close_session(session_id)

        def concerned(generation: Generation) -> bool:
            return generation.session.identity.session_id == session_id

        selects = everything if session_id is None else concerned
        left = list(await quiesce(self._controller, timeout_s, selects, abort=mode == "abort"))
        await call.reply({"status": "paused", "quiesced": not left, "running": left, "mode": mode})

    def _close_session(self, session_id: str) -> None:
        table = self._access.table
        if session_id not in table.open:
            ended = session_id in table.ended
            raise UnknownSession(
                "the session has ended" if ended else "no such session is open here", session_id=session_id
            )
        if len(self._gate.sessions) >= len(table.open) + _FORGOTTEN:
            self._gate.keep_sessions(table.open)
        self._gate.close_session(session_id)

    async def resume(self, call: Call) -> None:
        """`POST /v1/rollout/resume {version?, session_id?}`. `version`: the label of weights that an outer trainer gave the
        engines meanwhile. VersionConflict: no engine has it, and the pause stays. UnknownSession."""
        self._access.check_admin(call)
        body = await call.json(self._max_body)
        RESUME.check(body)
        session_id = body.get("session_id")
        if session_id is not None:
            if body.get("version") is not None:
                raise BadRequest("a version goes with a resume of everything", field="version")
            if session_id not in self._gate.sessions and session_id not in self._access.table.open:
                raise UnknownSession("no such session is open here", session_id=session_id)
            self._gate.open_session(session_id)
        else:
            if body.get("version") is not None:
                await self._updates.adopt(label_of(body["version"]))
            else:
                await asyncio.gather(*map(self._registry.is_alive, self._registry.engines))
            self._gate.open(REASON)
            self._since = None
        await call.reply({"status": "running", **self._state()})

    async def pause_state(self, call: Call) -> None:
        """`GET /v1/rollout/pause_state`."""
        self._access.check_admin(call)
        await call.reply(self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "paused": bool(list(self._gate.reasons)),
            "reasons": list(self._gate.reasons),
            "sessions": list(self._gate.sessions),
            "since": self._since,
            "waiting": self._gate.waiting,
            "running": list(self._controller.running),
        }


def label_of(value: str) -> str:
    """A version label from a request. BadRequest: it says that there is no version."""
    version = real_version(value)
    if version is None:
        raise BadRequest(f"version must be a real label, not {value!r}", field="version")
    return version


def seconds_of(body: dict[str, Any], default: float) -> float:
    """`timeout_seconds` of a request."""
    value = body.get("timeout_seconds")
    return default if value is None else float(value)
