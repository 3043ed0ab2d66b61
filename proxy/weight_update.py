"""A new version on all engines: gate closed, running generations cut or held, weights loaded, gate open.

`abort` cuts every engine call by its id; each generation keeps its tokens and resumes at the gate. `retract` lets the
engines hold their requests themselves. Invariants: one update at a time; nothing is loaded under a running generation
unless forced; an engine that fails leaves the rotation; if none took the weights, the old version goes on; whatever
happens, the gate opens and no engine stays paused.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import structlog

from journal.clock import Clock
from proxy.control_view import ControlView
from proxy.engines import Engine
from proxy.gate import Gate
from proxy.generation import GenerationController
from proxy.recorder import Publisher
from proxy.registry import EngineRegistry
from schemas.errors import EngineUnavailable, HoofprintError, RolloutError
from schemas.events import PolicyActivated, PolicyPublished, identified
from schemas.settings import Settings

log = structlog.get_logger(__name__)

REASON = "weight_update"
_ROUND_S = 0.05
"""Aborts are repeated this often: one that overtook its request on the way to the engine found nothing."""


class NotQuiesced(RolloutError):
    """Generations still run after `proxy.quiesce_timeout_s`; the update was refused."""

    code = "not_quiesced"
    http_status = 409


class Outcome(msgspec.Struct):
    """The answer of `POST /v1/policy/versions`."""

    version: str
    activated: list[str]
    failed: dict[str, str]
    preempted: int
    quiesced: bool
    pause_ms: float
    running: list[str]


class WeightUpdates:
    """Brings versions to engines."""

    def __init__(
        self, registry: EngineRegistry, gate: Gate, controller: GenerationController, control: ControlView,
        producer: Publisher, settings: Settings, clock: Clock,
    ) -> None:  # fmt: skip
        self._registry = registry
        self._gate = gate
        self._controller = controller
        self._control = control
        self._producer = producer
        self._run_id = settings.run.run_id
        self._strategy = settings.proxy.update_strategy
        self._quiesce_s = settings.proxy.quiesce_timeout_s
        self._clock = clock
        registry.newest = control.newest
        registry.joined = self._announce

    async def at_start(self) -> None:
        """What a killed proxy may have left: engines of other versions, or paused. Engines that are away join later."""
        self._registry.wanted = self._control.newest()
        async with self._registry.updating:
            joins = [self._registry.join(engine) for engine in self._registry.engines]
            for joined in await asyncio.gather(*joins, return_exceptions=True):
                if isinstance(joined, HoofprintError):
                    log.warning("engine_away_at_start", error=joined)
                elif joined is not None:
                    raise joined

    async def update(self, version: str, checkpoint: str, step: int | None, *, force: bool) -> Outcome:
        """The whole update. NotQuiesced; EngineUnavailable: no engine took it; TransportError: it cannot be published."""
        async with self._registry.updating:
            if self._is_active(version):
                for engine in self._registry.usable:
                    await self._announce(engine)
                return Outcome(version, [e.engine_id for e in self._registry.usable], {}, 0, True, 0.0, [])
            await self._publish(version, checkpoint, step)
            begin = time.perf_counter()
            self._gate.close(REASON)
            try:
                outcome = await self._paused(version, checkpoint, force=force)
            finally:
                self._gate.open(REASON)
            outcome.pause_ms = round((time.perf_counter() - begin) * 1000, 3)
        await self._activated(outcome)
        log.info("policy_activated", **msgspec.to_builtins(outcome))
        return outcome

    def _is_active(self, version: str) -> bool:
        wanted = self._registry.wanted
        return wanted is not None and wanted[0] == version and bool(self._registry.usable)

    async def _publish(self, version: str, checkpoint: str, step: int | None) -> None:
        if version in self._control.published:
            return
        event = identified(
            PolicyPublished(
                run_id=self._run_id,
                occurred_at=self._clock(),
                version=version,
                checkpoint_uri=checkpoint,
                step=step,
            )
        )
        await self._producer.apublish(event)
        self._control.fold(event)

    async def _paused(self, version: str, checkpoint: str, *, force: bool) -> Outcome:
        before = {generation: generation.preemptions for generation in self._controller.running.values()}
        targets = [engine for engine in self._registry.engines if engine.up]
        if not targets:
            raise EngineUnavailable("no engine is there to take the version", version=version)
        retract = self._strategy == "retract"
        try:
            if retract:
                await _all(targets, lambda engine: engine.pause("retract"))
                quiesced = True
            else:
                quiesced = await self._quiesce()
            running = list(self._controller.running)
            if not quiesced and not force:
                raise NotQuiesced(
                    "generations still run; the update was refused",
                    version=version,
                    quiesced=False,
                    running=running,
                )
            failed = await _all(targets, lambda engine: engine.update_weights(checkpoint, version))
        finally:
            if retract:
                await _all(targets, lambda engine: engine.go_on())
        self._rotate(targets, failed, version, checkpoint)
        activated = [engine.engine_id for engine in targets if engine.engine_id not in failed]
        # one that ended by itself while its abort was under way was not cut (rule 9)
        cut = len(before) if retract else sum(g.preemptions > was for g, was in before.items())
        return Outcome(version, activated, failed, cut, quiesced, 0.0, [] if retract else running)

    async def _quiesce(self) -> bool:
        deadline = time.monotonic() + self._quiesce_s
        while self._controller.running and time.monotonic() < deadline:
            await self._controller.preempt_all()
            if await self._controller.wait_quiet(min(_ROUND_S, max(0.0, deadline - time.monotonic()))):
                return True
        return not self._controller.running

    def _rotate(self, targets: list[Engine], failed: dict[str, str], version: str, checkpoint: str) -> None:
        if len(failed) == len(targets):
            raise EngineUnavailable(
                f"no engine took {version}; the old version goes on", version=version, activated=[], failed=failed,
                still_active=self._registry.wanted[0] if self._registry.wanted else None,
            )  # fmt: skip
        self._registry.wanted = (version, checkpoint)
        for engine in targets:
            engine.in_rotation = engine.engine_id not in failed

    async def _announce(self, engine: Engine) -> None:
        """An engine has the wanted version, and the log does not know it yet."""
        wanted = self._registry.wanted
        known = (engine.version, engine.engine_id) in self._control.activated
        if wanted is not None and engine.version == wanted[0] and not known:
            await self._activated(Outcome(engine.version, [engine.engine_id], {}, 0, True, 0.0, []))

    async def _activated(self, outcome: Outcome) -> None:
        for engine_id in outcome.activated:
            event = PolicyActivated(
                run_id=self._run_id,
                occurred_at=self._clock(),
                version=outcome.version,
                engine_id=engine_id,
                preempted=outcome.preempted,
                pause_ms=outcome.pause_ms,
            )
            await self._producer.apublish(identified(event))
            self._control.fold(event)


async def _all(engines: list[Engine], work: Any) -> dict[str, str]:
    """Do it at every engine; what failed, by engine."""
    results = await asyncio.gather(*(work(engine) for engine in engines), return_exceptions=True)
    failed: dict[str, str] = {}
    for engine, result in zip(engines, results, strict=True):
        if isinstance(result, HoofprintError):
            failed[engine.engine_id] = result.message
        elif isinstance(result, BaseException):
            raise result
    return failed
