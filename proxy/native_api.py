"""Native token-in token-out: SGLang's `/generate`, whole and streamed, inside a session.

`input_ids` is the whole context of the turn; its longest recorded prefix decides the lineage. The reply has SGLang's
shape with `meta_info.hoofprint` on top. Streams are cumulative, as SGLang's are by default.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
import orjson

from proxy.api_fields import NATIVE
from proxy.asgi import DONE, KEEP_ALIVE, Call, event, parsed, while_connected
from proxy.engine_refusals import NATIVE_FIELDS, naming_fields
from proxy.generation import Generation, HeadText
from proxy.known_head import Cut, cut_known
from proxy.limits import Limits
from proxy.metrics import Metrics
from proxy.routing import ID_BYTES, place_tokens
from proxy.session_access import SessionAccess
from proxy.streaming import Pace, watch_generation
from proxy.tito import Tokenizers
from proxy.turn import Turn
from proxy.turns import Turns, end_of, place_facts, text_field
from schemas.events import EndFacts, TokenSegment
from schemas.tokens import ids_of

_ONE_CALL = EndFacts(segment_count=0, status="completed", reason="single_call")


class NativeApi:
    """`POST /generate` and `POST /s/<token>/generate`."""

    def __init__(
        self, access: SessionAccess, turns: Turns, limits: Limits, metrics: Metrics, tokenizers: Tokenizers,
        pace: Pace,
    ) -> None:  # fmt: skip
        self._access = access
        self._turns = turns
        self._limits = limits
        self._metrics = metrics
        self._tokenizers = tokenizers
        self._pace = pace

    async def generate(self, call: Call) -> None:
        """One turn."""
        received_at = self._turns.clock()
        raw = await call.body(self._limits.max_body_bytes)
        known = self._access.known(call)
        cut = cut_known(raw, [lineage.tokens for lineage in known.lineages]) if known is not None else None
        cut = cut or Cut(b"", b"", parsed(raw))
        with self._limits.request():
            await while_connected(call, self._generate(call, cut, received_at))

    async def _generate(self, call: Call, cut: Cut, received_at: int) -> None:
        body = cut.body
        NATIVE.check(body)
        prompt = ids_of(cut.head)
        if not cut.head or body["input_ids"]:
            prompt = np.concatenate((prompt, self._turns.check_ids(body.get("input_ids"))))
        sampling, asked = sampling_of(body, self._turns.temperature)
        session, one_call = await self._access.session_for(call, body)
        budget = self._turns.budget(session, len(prompt), asked)
        end = end_of(body, session.identity.kind) or (_ONE_CALL if one_call else None)
        for field in NATIVE.unknown(body):
            self._metrics.ignored(field)
        stream, tops = bool(body.get("stream")), body.get("top_logprobs_num") or 0
        generation = Generation(session, prompt, sampling, budget, streams=stream, tops=tops)
        generation.head = HeadText(len(cut.head) // ID_BYTES, cut.text)
        skip = sampling.get("skip_special_tokens") is not False
        generation.decoder = partial(self._tokenizers.decoder, skip_special=skip)
        turn = self._turn(call, body, generation, prompt.tobytes(), received_at, end)
        with naming_fields(NATIVE_FIELDS, sampling):
            if stream:
                await self._stream(call, body, turn)
                return
            await self._turns.generate(turn)
        await self._mend_text(turn.generation)
        segment = await self._turns.record(turn)
        await call.reply(_answer(turn, body, segment))

    def _turn(
        self,
        call: Call,
        body: dict[str, Any],
        generation: Generation,
        prompt: bytes,
        received_at: int,
        end: EndFacts | None,
    ) -> Turn:
        place = place_tokens(generation.session.lineages, prompt)
        return Turn(
            api="generate",
            generation=generation,
            place=place,
            context_ids=prompt[4 * place.prefix :],
            digest=hashlib.sha256(prompt).hexdigest(),
            sampling=orjson.dumps({**generation.sampling, "max_new_tokens": generation.budget}).decode(),
            received_at=received_at,
            check=self._turns.checker(generation),
            find=lambda session: place_tokens(session.lineages, prompt),
            turn_id=text_field(call, body, "x-turn-id", "turn_id"),
            end=end,
        )

    async def _stream(self, call: Call, body: dict[str, Any], turn: Turn) -> None:
        work = asyncio.ensure_future(self._turns.generate(turn))
        async with aclosing(watch_generation(turn.generation, work, self._pace)) as arrivals:
            async for news in arrivals:
                if not call.started:
                    await call.start_events()
                await call.frame(event(_answer(turn, body, None)) if news else KEEP_ALIVE)
        await self._mend_text(turn.generation)
        segment = await self._turns.record(turn)
        if not call.started:
            await call.start_events()
        await call.frame(event(_answer(turn, body, segment)) + DONE, last=True)

    async def _mend_text(self, generation: Generation) -> None:
        """Texts of several calls do not make one: a character may have been cut, and some tokenizers drop a leading space."""
        if generation.output.pieces < 2 or not generation.output.text:
            return
        sampling, ids, matched = generation.sampling, generation.output_ids, generation.finish.get("matched")
        trims = not sampling.get("no_stop_trim")
        if trims and isinstance(matched, int) and ids and ids[-1] == matched:
            ids = ids[:-1]
        skip = sampling.get("skip_special_tokens") is not False
        text = await self._tokenizers.decode(ids, skip_special=skip)
        if text is not None:
            generation.output.text = text.split(matched, 1)[0] if trims and isinstance(matched, str) else text


def sampling_of(body: dict[str, Any], temperature: float) -> tuple[dict[str, Any], int]:
    """Sampling parameters for the engine, and the token budget that was asked for."""
    given = body.get("sampling_params") or {}
    sampling = {key: value for key, value in given.items() if value is not None}
    asked = sampling.pop("max_new_tokens", 128)
    sampling.setdefault("temperature", temperature)
    sampling.pop("n", None)
    return sampling, asked


def _answer(turn: Turn, body: dict[str, Any], segment: TokenSegment | None) -> dict[str, Any]:
    """SGLang's reply; without a segment, an intermediate event of a stream."""
    generation = turn.generation
    ids, logprobs = generation.output_ids, generation.logprobs
    meta: dict[str, Any] = {
        "id": body.get("rid") or generation.rid,
        "finish_reason": generation.finish if segment is not None else None,
        "prompt_tokens": len(generation.prompt),
        "completion_tokens": len(ids),
        "cached_tokens": generation.cached_tokens,
    }
    spans = generation.spans
    if spans:
        meta["weight_version"] = spans[-1].version
    if body.get("return_logprob"):
        meta["output_token_logprobs"] = [[p, i, None] for p, i in zip(logprobs, ids, strict=True)]
        meta["output_token_logprobs_length"] = len(ids)
        if generation.tops:
            meta["output_top_logprobs"] = generation.top_logprobs
    reply: dict[str, Any] = {"output_ids": ids, "meta_info": meta}
    if segment is not None:
        meta["weight_versions"] = [{"version": s.version, "start": s.start, "end": s.stop} for s in spans]
        meta["e2e_latency"] = (turn.done_at - turn.received_at) / 1e6
        meta["hoofprint"] = place_facts(segment)
        reply["text"] = generation.output.text
    return reply
