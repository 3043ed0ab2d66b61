"""One generation over all its engine calls: the request, and its growing result.

A generation that was cut keeps its tokens and goes on from prompt plus partial output with the budget that is left (what
follows a grammar begins anew). Invariants: every received token is kept once, with its log-prob and version; the budget is
exact over any number of preemptions.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson
import structlog
from numpy.typing import NDArray

from proxy.engine_stream import ChunkReader
from proxy.engines import Engine
from proxy.experts import ExpertCall, first_row
from proxy.output import Output
from proxy.resume_sampling import continued, has_grammar, inexact
from proxy.sessions import Session
from proxy.stop_watch import Decode, StopWatch
from schemas.errors import (
    GenerationPreempted,
    HoofprintError,
    UpstreamError,
)
from schemas.tokens import ID_TYPE
from schemas.versions import VersionSpan

log = structlog.get_logger(__name__)

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


class HeadText(NamedTuple):
    """The first `tokens` of a prompt as they stand in a JSON list, with the bracket before them."""

    tokens: int = 0
    text: bytes = b""


NO_HEAD = HeadText()


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
        self.head = NO_HEAD
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
        if interval > 1:
            sampling["stream_interval"] = interval
        body: dict[str, Any] = {
            "rid": self.rid,
            "input_ids": self._input_ids(),
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
        }
        if self._experts_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": self._experts_from}
        if self.tops:
            body["top_logprobs_num"] = self.tops
        return body

    def _input_ids(self) -> NDArray[np.int32] | orjson.Fragment:
        """Prompt and partial output; what the client has written itself goes on as it is."""
        ids, rest = self.output.ids, self.prompt[self.head.tokens :]
        if ids:
            rest = np.concatenate((rest, np.array(ids, ID_TYPE)))
        if not self.head.tokens:
            return rest
        text = orjson.dumps(rest, option=orjson.OPT_SERIALIZE_NUMPY)[1:]
        return orjson.Fragment(self.head.text + (b"," if len(rest) else b"") + text)
