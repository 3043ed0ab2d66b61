"""Versions and pauses over HTTP, for the trainer and for an outer one.

`POST /v1/policy/versions` does a whole update. `/v1/rollout/pause` and `/resume` hold generation while somebody else
updates the engines: running generations are aborted (they resume with what they have) unless mode is `drain`.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec

from proxy.asgi import Call
from proxy.gate import Gate
from proxy.generation import GenerationController
from proxy.registry import EngineRegistry
from proxy.session_access import SessionAccess
from proxy.weight_update import WeightUpdates
from schemas.errors import BadRequest, HoofprintError
from schemas.versions import real_version

REASON = "rollout_pause"
_ROUND_S = 0.05


class PolicyApi:
    """The admin's endpoints."""

    def __init__(
        self, access: SessionAccess, updates: WeightUpdates, registry: EngineRegistry, gate: Gate,
        controller: GenerationController, max_body_bytes: int, quiesce_s: float,
    ) -> None:  # fmt: skip
        self._access = access
        self._updates = updates
        self._registry = registry
        self._gate = gate
        self._controller = controller
        self._max_body = max_body_bytes
        self._quiesce_s = quiesce_s
        self._since: float | None = None

    async def versions(self, call: Call) -> None:
        """`POST /v1/policy/versions {version, checkpoint_uri, step?, force?}`."""
        self._access.check_admin(call)
        self._access.check_ready()
        body = await call.json(self._max_body)
        version = real_version(body.get("version"))
        if version is None or len(version) > 200:
            raise BadRequest("version must be a real label", field="version")
        checkpoint, step = body.get("checkpoint_uri"), body.get("step")
        if not isinstance(checkpoint, str) or not checkpoint:
            raise BadRequest("checkpoint_uri must be a checkpoint directory", field="checkpoint_uri")
        if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
            raise BadRequest("step must be a whole number", field="step")
        # the caller may go away: an update that has begun is brought to its end
        work = self._updates.update(
            version, _directory(checkpoint), step, force=bool(body.get("force", False))
        )
        outcome = await asyncio.shield(asyncio.ensure_future(work))
        await call.reply(msgspec.to_builtins(outcome))

    async def pause(self, call: Call) -> None:
        """`POST /v1/rollout/pause {reason, mode, timeout_seconds, session_id?}`."""
        self._access.check_admin(call)
        body = await call.json(self._max_body)
        timeout = body.get("timeout_seconds", self._quiesce_s)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout <= 3600:
            raise BadRequest("timeout_seconds must be a number from 0 to 3600", field="timeout_seconds")
        mode = body.get("mode") or "abort"
        if mode not in ("abort", "drain"):
            raise BadRequest("mode must be abort or drain", field="mode")
        session_id = body.get("session_id")
        if session_id is not None:
            self._gate.close_session(str(session_id))
        else:
            self._gate.close(REASON)
            self._since = self._since or time.time()
        left = await self._wait(session_id, mode == "abort", float(timeout))
        await call.reply({"status": "paused", "quiesced": not left, "running": left, "mode": mode})

    async def _wait(self, session_id: str | None, abort: bool, timeout_s: float) -> list[str]:
        deadline = time.monotonic() + timeout_s
        while True:
            left = {
                rid: g for rid, g in self._controller.running.items()
                if session_id is None or g.session.identity.session_id == session_id
            }  # fmt: skip
            if not left or time.monotonic() >= deadline:
                return list(left)
            if abort:
                await asyncio.gather(
                    *(g.engine.abort(rid) for rid, g in left.items() if g.engine is not None)
                )
            await asyncio.sleep(min(_ROUND_S, max(0.0, deadline - time.monotonic())))

    async def resume(self, call: Call) -> None:
        """`POST /v1/rollout/resume {version?, session_id?}`: labels are asked from the engines first."""
        self._access.check_admin(call)
        body = await call.json(self._max_body)
        if body.get("session_id") is not None:
            self._gate.open_session(str(body["session_id"]))
        else:
            await self._relabel(body.get("version"))
            self._gate.open(REASON)
            self._since = None
        await call.reply({"status": "running", **self._state()})

    async def _relabel(self, version: object) -> None:
        """An outer trainer may have changed the weights: what the engines say now is what counts."""
        for engine in self._registry.engines:
            try:
                await engine.refresh()
            except HoofprintError:
                continue
        labels = {engine.version for engine in self._registry.engines if engine.up}
        wanted = self._registry.wanted
        if version is not None and str(version) in labels and (wanted is None or wanted[0] != str(version)):
            self._registry.wanted = None

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


def _directory(uri: str) -> str:
    path = uri.removeprefix("file://")
    return str(Path(path).absolute()) if "://" not in path else uri
