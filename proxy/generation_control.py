"""Running generations at engines: dispatch, preemption, resume, and rules 4, 5 and 9 where they bind.

A weight update aborts the engine call by rid; the generation waits at the gate, and goes on with what it has. Invariants: rules
4 and 5 are checked before any engine time is spent, and again on the reply; a cancelled generation leaves nothing at an engine or
in a table; a generation whose engine died goes on at another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import structlog

from proxy.engine_stream import refusal
from proxy.engines import Engine
from proxy.gate import Gate
from proxy.generation import Generation
from proxy.metrics import Metrics
from proxy.registry import EngineRegistry
from schemas.errors import EngineTimeout, EngineUnavailable
from schemas.finish import decide
from schemas.settings import StalenessSettings
from schemas.span import check_span, check_unchanged

log = structlog.get_logger(__name__)

_FRUITLESS = 3
"""So many engine calls in a row without a token, and nobody asked for an abort: the engine cannot."""


class Intervals(NamedTuple):
    """Tokens per event of an engine: of replies that a client streams (0: what comes in a frame's time), and of others."""

    streamed: int = 1
    whole: int = 1
    frame_s: float = 0.0

    def of(self, engine: Engine, *, streams: bool) -> int:
        """What to ask this engine for."""
        if not streams:
            return self.whole
        return self.streamed or engine.pace.tokens_in(self.frame_s, self.whole)


EVERY_TOKEN = Intervals()


class GenerationController:
    """Runs generations. `running`: those with an engine call in flight, by rid."""

    def __init__(
        self,
        registry: EngineRegistry,
        gate: Gate,
        staleness: StalenessSettings,
        metrics: Metrics,
        *,
        record_experts: bool = True,
        intervals: Intervals = EVERY_TOKEN,
    ) -> None:
        self.running: dict[str, Generation] = {}
        self._registry = registry
        self._gate = gate
        self._staleness = staleness
        self._metrics = metrics
        self._record_experts = record_experts
        self._intervals = intervals
        self._quiet = asyncio.Event()
        self._aborts: set[asyncio.Task[None]] = set()

    async def run(self, generation: Generation) -> None:
        """Until it has ended by itself or by its budget. StalenessExceeded, TrajectoryVersionChanged, UpstreamError."""
        avoid: set[str] = set()
        lost: set[str] = set()
        fruitless = 0
        while True:
            await self._gate.enter(generation.session.identity.session_id)
            if generation.output_ids:
                await generation.prepare_resume()
            engine = self._registry.pick(generation.session.engine, avoid)
            self.check_versions(generation, [*generation.versions, engine.version])
            before = generation.left
            try:
                finish = await self._call(generation, engine)
            except EngineUnavailable as broken:
                name = engine.engine_id
                if name in lost or not await self._registry.is_alive(engine):
                    avoid.add(name)  # else only the connection broke: one more try
                lost.add(name)
                log.warning("generation_lost_its_engine", error=broken, kept=len(generation.output_ids))
                finish = generation.stopped or {"type": "abort"}
            else:
                preempted = finish.get("type") == "abort"
                generation.preemptions += preempted
                self._metrics.preempted(preempted + generation.held)
                if generation.versions:
                    await self._registry.heard(engine, generation.versions[-1])
                fruitless = (
                    fruitless + 1
                    if preempted and generation.left == before and self._gate_open(generation)
                    else 0
                )
            if self._settle(generation, finish):
                return
            if fruitless >= _FRUITLESS:
                raise EngineUnavailable("the engine aborts without a token", engine=engine.engine_id)

    def _gate_open(self, generation: Generation) -> bool:
        return self._gate.is_open(generation.session.identity.session_id)

    def _settle(self, generation: Generation, finish: Mapping[str, Any]) -> bool:
        """Rule 9: whether it is over."""
        match decide(finish.get("type"), generation.left):
            case "complete":
                generation.finish = {k: v for k, v in finish.items() if v is not None}
                if finish.get("type") == "length":
                    # the engine counts its last call only
                    generation.finish["length"] = len(generation.output_ids)
            case "length":
                generation.finish = {"type": "length", "length": len(generation.output_ids)}
            case "resume":
                generation.resumes += 1
                self._metrics.resumed()
                return False
        for field in generation.inexact:
            self._metrics.inexact(field)
        return True

    async def _call(self, generation: Generation, engine: Engine) -> Mapping[str, Any]:
        reader = generation.begin_call(engine, experts=self._record_experts and engine.gives_experts)
        session = generation.session
        if session.engine not in (None, engine.engine_id):
            self._metrics.switched()
        session.engine = engine.engine_id
        rid = generation.rid
        self.running[rid] = generation
        try:
            interval = self._intervals.of(engine, streams=generation.streams)
            await engine.generate(
                generation.request_body(interval),
                session.identity.session_id,
                reader,
                generation.news,
            )
            if generation.stopped is not None:
                self._later(engine.abort(rid))
        except (asyncio.CancelledError, EngineTimeout):
            # the closed connection aborts it as well, but some engines notice that seconds later
            self._later(engine.abort(rid))
            raise
        finally:
            del self.running[rid]
            if not self.running:
                self._quiet.set()
            finish = generation.end_call()
        assert finish is not None
        _raise_failure(finish)
        return finish

    def check_versions(self, generation: Generation, candidate: list[str]) -> None:
        """Rules 4 and 5 for the session's versions and this generation's."""
        session = generation.session
        ids = {"session_id": session.identity.session_id, "instance_id": session.identity.instance_id}
        if not self._staleness.partial_rollout and candidate:
            check_unchanged([*session.versions, *candidate[:-1]], candidate[-1], **ids)
        check_span(session.versions, candidate, self._staleness.max_partial_rollout_preempts, **ids)

    async def wait_quiet(self, timeout_s: float) -> bool:
        """Whether no engine call was left within this time."""
        self._quiet.clear()
        if not self.running:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()
        except TimeoutError:
            return not self.running
        return True

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


def _raise_failure(finish: Mapping[str, Any]) -> None:
    status = finish.get("status_code")
    if finish.get("type") == "abort" and status:
        raise refusal(str(finish.get("message")), int(status))
