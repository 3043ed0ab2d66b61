"""What operators ask: health, readiness, metrics, counts, models."""

from __future__ import annotations

from typing import get_args

from proxy.asgi import Call
from proxy.catch_up import CatchUp
from proxy.control_view import ControlView
from proxy.gate import Gate
from proxy.limits import Limits
from proxy.metrics import Metrics
from proxy.registry import EngineRegistry, EngineState
from proxy.sessions import SessionTable
from schemas.errors import EngineUnavailable, Overloaded


class OperationsApi:
    """Open to everybody who reaches the port: no payloads, no ids of sessions."""

    def __init__(
        self, registry: EngineRegistry, table: SessionTable, gate: Gate, control: ControlView, limits: Limits,
        metrics: Metrics, catch_up: CatchUp, started_at: int,
    ) -> None:  # fmt: skip
        self._registry = registry
        self._table = table
        self._gate = gate
        self._control = control
        self._limits = limits
        self._metrics = metrics
        self._catch_up = catch_up
        self._started_at = started_at

    async def health(self, call: Call) -> None:
        """The process lives."""
        await call.reply({"status": "ok"})

    async def ready(self, call: Call) -> None:
        """The log was folded and an engine is there."""
        if not self._control.ready:
            raise Overloaded("the proxy is still reading the log", http_status=503)
        if not self._registry.usable:
            raise EngineUnavailable("no engine is there")
        await call.reply({"status": "ready"})

    async def stats(self, call: Call) -> None:
        """`GET /v1/stats`."""
        counts = self._metrics.counts
        names = (
            "requests",
            "refusals",
            "preemptions",
            "resumes",
            "segments",
            "output_tokens",
            "tito_mismatch_tokens",
        )
        await call.reply(
            {
                **{name: counts[name] for name in names},
                "refusals_by_code": {k[9:]: v for k, v in counts.items() if k.startswith("refusals.")},
                "ignored_fields": counts["ignored_fields"],
                "open_sessions": len(self._table.open),
                "inflight": self._limits.inflight,
                "gate_waiting": self._gate.waiting,
                "running": sum(engine.inflight for engine in self._registry.engines),
                "engines": {
                    e.engine_id: {
                        "version": e.version,
                        "up": e.up,
                        "in_rotation": e.in_rotation,
                        "state": self._registry.state(e),
                        "inflight": e.inflight,
                    }
                    for e in self._registry.engines
                },
                "active_version": self._registry.wanted[0] if self._registry.wanted else None,
                "started_at": self._started_at,
            }
        )

    async def metrics(self, call: Call) -> None:
        """`GET /metrics`."""
        gauges = self._metrics.gauges
        gauges["hoofprint_gate_waiting"].set(self._gate.waiting)
        gauges["hoofprint_inflight"].set(self._limits.inflight)
        gauges["hoofprint_open_sessions"].set(len(self._table.open))
        for engine in self._registry.engines:
            self._metrics.engine(
                engine.engine_id, self._registry.state(engine), get_args(EngineState), engine.inflight,
                self._catch_up.backoff[engine.engine_id].failures,
            )  # fmt: skip
        await call.text(self._metrics.exposition())

    async def models(self, call: Call) -> None:
        """`GET /v1/models`: the policy under one name, whatever its version is."""
        window = self._registry.limit("context_length")
        card = {
            "id": "policy",
            "object": "model",
            "created": self._started_at // 1_000_000,
            "owned_by": "hoofprint",
        }
        await call.reply({"object": "list", "data": [{**card, "max_model_len": window}]})
