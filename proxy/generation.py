"""One generation over all its engine calls: dispatch, preemption, resume, and rules 4, 5 and 9 where they bind.

A weight update aborts the engine call by rid; the generation keeps its tokens, waits at the gate, and goes on from prompt
plus partial output with the budget that is left (what follows a grammar begins anew). Invariants: every received token is
kept once, with its log-prob and version; rules 4 and 5 are checked before any engine time is spent, and again on the reply;
the budget is exact over any number of preemptions; a cancelled generation leaves nothing at an engine or in a table.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from proxy.engine_stream import ChunkReader, refusal
from proxy.engines import Engine
from proxy.experts import ExpertCall, first_row
from proxy.gate import Gate
from proxy.metrics import Metrics
from proxy.output import Output
from proxy.registry import EngineRegistry
from proxy.resume_sampling import continued, has_grammar, inexact
from proxy.sessions import Session
from proxy.stop_watch import Decode, StopWatch
from schemas.errors import (
    EngineTimeout,
    EngineUnavailable,
    GenerationPreempted,
    HoofprintError,
    UpstreamError,
)
from schemas.finish import decide
from schemas.settings import StalenessSettings
from schemas.span import check_span, check_unchanged
from schemas.tokens import ID_TYPE
from schemas.versions import VersionSpan

log = structlog.get_logger(__name__)

_FRUITLESS = 3
"""So many engine calls in a row without a token, and nobody asked for an abort: the engine cannot."""


Decoder = Callable[[], Awaitable[Decode | None]]
"""How to find a decoder of the output: None where no tokenizer can be had."""


def nobody() -> None:
    """Nobody listens."""


def known(decode: Decode | None) -> Decoder:
    """A decoder that needs no search."""

    async def find() -> Decode | None:
        return decode

    return find


_UNKNOWN = known(None)


class Generation:
    """The request (`prompt`, `sampling`, `budget`) and its growing result. `streams`: its client sees it grow."""

    def __init__(
        self,
        session: Session,
        prompt: NDArray[np.int32],
        sampling: Mapping[str, Any],
        budget: int,
        *,
        streams: bool,
        tops: int = 0,
    ) -> None:
        self.session = session
        self.prompt = prompt
        self.sampling = sampling
        self.budget = budget
        self.streams = streams
        self.tops = tops
        self.output = Output()
        self.first_token: Callable[[], None] = nobody
        self.wake: Callable[[], None] = nobody
        """Called when there is something new, for a client that streams."""
        self.interrupt: HoofprintError | None = None
        """Why it was cancelled, if not by its client."""
        self.decoder: Decoder = _UNKNOWN
        self.stop_watch: StopWatch | None = None
        self.stopped: dict[str, Any] | None = None
        """Its end, if it was found here and not by the engine."""
        self.inexact: set[str] = set()
        """Fields that a resume could not hand on exactly."""
        self.kept = 0
        """Tokens of the prompt that the lineage has already."""
        self.expert_calls: list[ExpertCall] = []
        self.rid = ""
        self.engine: Engine | None = None
        self.version_at_dispatch = ""
        self.cached_tokens = 0
        self.preemptions = 0
        self.held = 0
        self.resumes = 0
        self.span_mismatches = 0
        self.finish: dict[str, Any] = {}
        self._call: ChunkReader | None = None
        self._experts_from: int | None = None

    @property
    def output_ids(self) -> list[int]:
        """All output so far, over all calls; not to be changed."""
        return self.output.ids

    @property
    def logprobs(self) -> list[float]:
        """Log-probs of `output_ids`."""
        return self.output.logprobs

    @property
    def top_logprobs(self) -> list[Any]:
        """Alternatives per output token, as the engine gives them."""
        return self.output.tops

    @property
    def spans(self) -> list[VersionSpan]:
        """Versions of `output_ids`."""
        return self.output.spans

    @property
    def versions(self) -> list[str]:
        """Labels in time order."""
        return [span.version for span in self.output.spans]

    @property
    def left(self) -> int:
        """What remains of the budget."""
        return self.budget - len(self.output.ids)

    def news(self) -> None:
        """Something came from the engine."""
        if self.stop_watch is not None:
            self.look()
            self._look_for_stop()
        self.first_token()
        self.wake()

    def look(self) -> None:
        """Bring the output up to what has come."""
        if self._call is not None:
            with contextlib.suppress(UpstreamError):  # the call itself finds it, and tries again
                self._call.settle()

    def _look_for_stop(self) -> None:
        """End where a stop string ends that an earlier call began: the engine cannot see it."""
        if self.stop_watch is None or self._call is None:
            return
        found = self.stop_watch.look(self.output.ids)
        if found is not None:
            self.stopped = {"type": "stop", "matched": found.stop}
            self._call.stop(found.tokens, self.stopped)
        if self.stop_watch.over:
            self.stop_watch = None

    async def prepare_resume(self) -> None:
        """What a call behind earlier output needs. GenerationPreempted: output that follows a grammar was shown already."""
        stops = self.sampling.get("stop") or ()
        if has_grammar(self.sampling):
            self._start_over()
        elif stops:
            decode = await self.decoder()
            stops = [stops] if isinstance(stops, str) else stops
            self.stop_watch = StopWatch(decode, stops, self.output.ids) if decode is not None else None
            if decode is None:
                self.inexact.add("stop")

    def _start_over(self) -> None:
        if self.streams:
            raise GenerationPreempted(
                "a weight update cut output that follows a grammar, which no engine can go on with",
                session_id=self.session.identity.session_id,
            )
        self.output = Output()
        self.expert_calls.clear()
        self.version_at_dispatch = ""

    def begin_call(self, engine: Engine, *, experts: bool = False) -> ChunkReader:
        """A new engine call, with an id of its own. `experts`: it shall say where tokens were routed."""
        first = len(self.prompt) + len(self.output.ids) if self.output.ids else self.kept
        self._experts_from = first_row(first) if experts else None
        self.rid = uuid.uuid4().hex
        self.engine = engine
        self.version_at_dispatch = self.version_at_dispatch or engine.version
        self._call = engine.new_reader(self.output)
        return self._call

    def end_call(self) -> Mapping[str, Any] | None:
        """Close the call; its finish reason, or None if it broke off."""
        self._look_for_stop()
        call, self._call = self._call, None
        assert call is not None
        self.held = call.changes  # an engine that held it over updates, as its last call tells
        self.preemptions += self.held
        before = len(self.output.ids) - call.count
        rows = call.meta.get("routed_experts") if self._experts_from is not None else None
        self.expert_calls.append(
            ExpertCall(len(self.prompt) + before, call.count, self._experts_from or 0, rows)
        )
        self.output.pieces += bool(call.count)
        ids = self.output.ids
        self.inexact.update(inexact(self.sampling, ids[:before], ids[before:]) if before else ())
        self.span_mismatches += call.span_mismatch
        if before == 0:
            self.cached_tokens = int(call.meta.get("cached_tokens") or 0)
        return call.finish

    def request_body(self, interval: int) -> dict[str, Any]:
        """What the engine gets: prompt plus partial output, and the rest of the budget. `interval`: tokens per event."""
        ids = self.output.ids
        sampling = continued(self.sampling, ids, self.left)
        if interval > 1 and not self.streams:
            sampling["stream_interval"] = interval
        body = {
            "rid": self.rid,
            "input_ids": np.concatenate((self.prompt, np.array(ids, ID_TYPE))) if ids else self.prompt,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
        }
        if self._experts_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": self._experts_from}
        if self.tops:
            body["top_logprobs_num"] = self.tops
        return body


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
        interval: int = 1,
    ) -> None:
        self.running: dict[str, Generation] = {}
        self._registry = registry
        self._gate = gate
        self._staleness = staleness
        self._metrics = metrics
        self._record_experts = record_experts
        self._interval = interval
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
            await engine.generate(
                generation.request_body(self._interval),
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
