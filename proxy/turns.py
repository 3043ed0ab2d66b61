"""A turn from request to record: budget, generation, refusal, segment. Shared by every API.

Order: limits of the engine first (ids in the vocabulary, prompt inside the window), then the gate and the engines, then
the record, then the answer. A refusal by rule 4 or 5 ends the trajectory in the log before its 502 leaves.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from journal.clock import Clock
from proxy.api_fields import NAME
from proxy.asgi import Call
from proxy.generation import Generation, nobody
from proxy.generation_control import GenerationController
from proxy.limits import Limits
from proxy.metrics import Metrics
from proxy.ownership import SessionTaken
from proxy.recorder import Recorder
from proxy.recovery import CLAIMS
from proxy.registry import EngineRegistry
from proxy.session_access import SessionAccess, interrupt
from proxy.sessions import Session
from proxy.turn import Turn
from schemas.errors import (
    BadRequest,
    ContextOverflow,
    HoofprintError,
    SessionConflict,
    StalenessExceeded,
    TrajectoryVersionChanged,
)
from schemas.events import EndFacts, Kind, TokenSegment
from schemas.settings import ProxySettings
from schemas.tokens import ID_TYPE

_DETAIL = 4000
"""Characters of an end's detail that are kept."""


class Turns:
    """Runs turns of sessions."""

    def __init__(
        self, controller: GenerationController, registry: EngineRegistry, access: SessionAccess, recorder: Recorder,
        limits: Limits, settings: ProxySettings, clock: Clock, metrics: Metrics,
    ) -> None:  # fmt: skip
        self._controller = controller
        self._limits = limits
        self._access = access
        self._registry = registry
        self._recorder = recorder
        self._window = settings.context_window
        self.temperature = settings.temperature
        self.clock = clock
        self._metrics = metrics

    def check_ids(self, ids: object) -> NDArray[np.int32]:
        """Token ids of a request. BadRequest: not a list of whole numbers in the vocabulary (others kill an engine)."""
        if not isinstance(ids, list) or not ids:
            raise BadRequest("input_ids must be a list of token ids that is not empty", field="input_ids")
        try:
            packed = np.frombuffer(array("i", ids), ID_TYPE)
        except (TypeError, OverflowError) as wrong:
            raise BadRequest(
                "input_ids must be a list of token ids (32-bit integers)", field="input_ids"
            ) from wrong
        size = self._registry.limit("vocab_size")
        if any(isinstance(ids[place], bool) for place in np.flatnonzero(packed <= 1)):
            raise BadRequest("input_ids must be a list of token ids, not of truth values", field="input_ids")
        if packed.min() < 0 or (size is not None and packed.max() >= size):
            bad = next(i for i in ids if i < 0 or (size is not None and i >= size))
            raise BadRequest(
                f"token id {bad} is outside the vocabulary of {size}",
                field="input_ids",
                token_id=bad,
                vocab_size=size,
            )
        return packed

    def budget(self, session: Session, prompt_tokens: int, max_new_tokens: int | None) -> int:
        """min(asked, what the context window leaves). ContextOverflow if it leaves nothing."""
        known = [n for n in (self._window, self._registry.limit("context_length")) if n]
        if not known:
            return max_new_tokens if max_new_tokens is not None else 128
        window = min(known)
        if prompt_tokens >= window:
            raise ContextOverflow(
                f"the prompt has {prompt_tokens} tokens, the context window {window}", phase="input",
                context_window=window, input_tokens=prompt_tokens, output_tokens=0, total_tokens=prompt_tokens,
                max_tokens=max_new_tokens, session_id=session.identity.session_id,
            )  # fmt: skip
        room = window - prompt_tokens
        return room if max_new_tokens is None else min(max_new_tokens, room)

    async def generate(self, turn: Turn) -> None:
        """Let the engines work. RolloutError, UpstreamError; CancelledError: the client has gone, nothing is left behind."""
        generation = turn.generation
        session = generation.session

        def first_token() -> None:
            turn.first_token_at = turn.first_token_at or self.clock()

        self._limits.check_session(session.busy)
        generation.first_token = first_token
        session.inflight[generation] = task = asyncio.current_task()
        try:
            await self._controller.run(generation)
            turn.done_at = self.clock()
            turn.check()
        except asyncio.CancelledError:
            if generation.interrupt is not None and task is not None:
                task.uncancel()
                raise generation.interrupt from None
            raise
        except (StalenessExceeded, TrajectoryVersionChanged) as refusal:
            session.inflight.pop(generation, None)
            await self._refuse(session, refusal)
            raise
        finally:
            # it holds the turn, which holds the generation: a circle outlives its session
            generation.first_token = nobody
            session.inflight.pop(generation, None)
            session.used_at = self.clock()

    async def record(self, turn: Turn) -> TokenSegment:
        """Write the segment; when this returns, the answer may leave."""
        begin = self.clock()
        try:
            segment = await self._write(turn)
        except (StalenessExceeded, TrajectoryVersionChanged) as refusal:
            await self._refuse(turn.generation.session, refusal)
            raise
        turn.log_seconds = (self.clock() - begin) / 1e6
        engine_s = (turn.done_at - turn.received_at) / 1e6
        self._metrics.times(
            engine_s, turn.log_seconds, (self.clock() - turn.done_at) / 1e6 - turn.log_seconds
        )
        return segment

    async def _write(self, turn: Turn) -> TokenSegment:
        for _ in range(CLAIMS):
            try:
                return await self._recorder.segment(turn)
            except SessionTaken:
                # nothing of the turn counts in the log, but its tokens are right: it goes behind what the log has
                turn.move(await self._access.reopen(turn.generation.session))
        return await self._recorder.segment(turn)

    def checker(self, generation: Generation) -> Any:
        """Rules 4 and 5 on what a generation brought, for `Turn.check`."""
        return lambda: self._controller.check_versions(generation, generation.versions)

    async def _refuse(self, session: Session, refusal: HoofprintError) -> None:
        """The trajectory ends with the refusal; a call that finds another end raises that end's error."""
        if session.end is not None or session.stale_claim:
            return
        interrupt(session, refusal)
        facts = {"message": refusal.message, **refusal.detail}
        end = EndFacts(
            segment_count=0, status="failed", reason=refusal.code, detail=msgspec.json.encode(facts).decode()
        )
        try:
            await self._recorder.end(session, end)
        except SessionConflict:
            return  # the next call claims the session, and is refused by what the log says


def place_facts(segment: TokenSegment) -> dict[str, Any]:
    """The `hoofprint` object of every reply."""
    return {
        "session_id": segment.session_id,
        "parent_traj_id": segment.parent_traj_id,
        "segment_index": segment.segment_index,
        "lineage_id": segment.lineage_id,
        "preemptions": segment.preemptions,
        "versions": [span.version for span in segment.spans],
    }


def end_of(body: dict[str, Any], kind: Kind) -> EndFacts | None:
    """`final: true` with `end: {status, reason, reward, components}`: the segment of a session of this kind carries the end."""
    if not body.get("final"):
        if body.get("end") is not None:
            raise BadRequest("end goes with final: true", field="end")
        return None
    facts = end_facts(body.get("end") or {})
    check_reward(facts, kind, "end.")
    return facts


def check_reward(end: EndFacts, kind: Kind, prefix: str = "") -> None:
    """BadRequest: the end of what shall be trained on neither has a reward nor promises one; its group would wait for it."""
    if kind == "train" and end.status != "failed" and end.reward is None and not end.reward_pending:
        raise BadRequest(
            "a trajectory of a group ends with its reward, or with reward_pending: true",
            field=prefix + "reward",
        )


def end_facts(end: dict[str, Any]) -> EndFacts:
    """The end that a caller asks for, its fields checked; the count of segments is filled in when it is written."""
    reward, detail = end.get("reward"), end.get("detail")
    return EndFacts(
        segment_count=0,
        status=end.get("status") or "completed",
        reason=(end.get("reason") or "done")[:256],
        reward=None if reward is None else float(reward),
        reward_pending=bool(end.get("reward_pending")),
        components=components_of(end),
        detail=None if detail is None else detail[:_DETAIL],
    )


def components_of(body: dict[str, Any]) -> dict[str, float]:
    """Reward components: names to numbers."""
    return {name: float(value) for name, value in (body.get("components") or {}).items()}


def text_field(call: Call, body: dict[str, Any], header: str, field: str) -> str | None:
    """A name in a header, else in the body, else None. BadRequest: the header's is too long."""
    value = call.header(header)
    if value:
        NAME.check(value, header)
    return value or body.get(field) or None
