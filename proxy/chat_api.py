"""`POST /v1/chat/completions`, whole and streamed, token-in token-out.

The conversation decides the lineage; the prompt is the lineage's own tokens plus the encoding of what was appended. The
log has, per turn, only the messages it added, so a restarted proxy can follow the conversation at linear cost.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import aclosing
from typing import Any

import orjson

from proxy.asgi import DONE, KEEP_ALIVE, Call, event, while_connected
from proxy.chat_reply import Chunks, assistant_message, completion, final_text, logprob_content
from proxy.chat_request import ChatRequest, parse_chat
from proxy.detokenize import TextStream
from proxy.generation import Generation
from proxy.limits import Limits
from proxy.metrics import Metrics
from proxy.routing import Place, chain_of, next_link, place_messages, request_digest
from proxy.session_access import SessionAccess
from proxy.sessions import Session
from proxy.streaming import watch_generation
from proxy.tito import ChatTokenizer, TemplateCannot, Tokenizers
from proxy.tool_calls import OPEN
from proxy.turn import Turn
from proxy.turns import Turns, end_of, place_facts, text_field
from schemas.events import EndFacts, TokenSegment
from schemas.tokens import ids_of, pack_ids

_ONE_CALL = EndFacts(segment_count=0, status="completed", reason="single_call")


class ChatApi:
    """Chat completions."""

    def __init__(
        self, access: SessionAccess, turns: Turns, limits: Limits, metrics: Metrics, tokenizers: Tokenizers,
        keepalive_s: float,
    ) -> None:  # fmt: skip
        self._access = access
        self._turns = turns
        self._limits = limits
        self._metrics = metrics
        self._tokenizers = tokenizers
        self._keepalive_s = keepalive_s

    async def completions(self, call: Call) -> None:
        """One turn."""
        received_at = self._turns.clock()
        body = await call.json(self._limits.max_body_bytes)
        with self._limits.request():
            await while_connected(call, self._complete(call, body, received_at))

    async def _complete(self, call: Call, body: dict[str, Any], received_at: int) -> None:
        request = parse_chat(body, self._turns.temperature)
        tokenizer = await self._tokenizers.get()
        session, one_call = await self._access.session_for(call, body)
        for field in request.ignored:
            self._metrics.ignored(field)
        turn = self._turn(session, request, tokenizer, received_at)
        turn.turn_id = text_field(call, body, "x-turn-id", "turn_id")
        turn.end = end_of(body) or (_ONE_CALL if one_call else None)
        created = received_at // 1_000_000
        if request.stream:
            await self._stream(call, request, tokenizer, turn, created)
            return
        await self._turns.generate(turn)
        message = self._answer(request, tokenizer, turn)
        segment = await self._turns.record(turn)
        await call.reply(
            completion(request, turn.generation, tokenizer, message, created, place_facts(segment))
        )

    # -- prompt --------------------------------------------------------------------------------------

    def _turn(
        self, session: Session, request: ChatRequest, tokenizer: ChatTokenizer, received_at: int
    ) -> Turn:
        chain = chain_of(request.tools, request.messages)
        place = place_messages(session.by_chain, chain, session.known_tools)
        session.known_tools.add(chain[0])
        place, context, mismatch = _encode(session, place, request, tokenizer)
        prompt = [*ids_of(session.tokens_of(place)).tolist(), *context]
        self._turns.check_ids(prompt)
        budget = self._turns.budget(session, len(prompt), request.max_tokens)
        sampling = dict(request.sampling)
        if tokenizer.eos_token_id is not None and not sampling.get("ignore_eos"):
            sampling["stop_token_ids"] = sorted({*sampling.get("stop_token_ids", ()), tokenizer.eos_token_id})
        generation = Generation(
            session, prompt, sampling, budget, eager=request.stream, tops=request.top_logprobs
        )
        known = place.parent.messages if place.parent is not None else 0
        recorded: dict[str, Any] = {"messages": request.messages[known:]}
        if place.parent is None and request.tools:
            recorded["tools"] = request.tools
        return Turn(
            api="chat",
            generation=generation,
            place=place,
            context_ids=pack_ids(context),
            digest=request_digest(chain),
            sampling=orjson.dumps({**sampling, "max_new_tokens": budget}).decode(),
            received_at=received_at,
            check=self._turns.checker(generation),
            request=orjson.dumps(recorded).decode(),
            chain=chain[-1],
            messages=len(request.messages) + 1,
            mismatch_tokens=mismatch,
        )

    def _answer(self, request: ChatRequest, tokenizer: ChatTokenizer, turn: Turn) -> dict[str, Any]:
        """The assistant's message; the turn learns the conversation behind it."""
        text = final_text(turn.generation, tokenizer, request.stops)
        message = assistant_message(text, request.tools, turn.generation.rid)
        turn.response = orjson.dumps(message).decode()
        turn.chain = next_link(turn.chain, message)
        return message

    # -- stream --------------------------------------------------------------------------------------

    async def _stream(
        self, call: Call, request: ChatRequest, tokenizer: ChatTokenizer, turn: Turn, created: int
    ) -> None:
        chunks = Chunks(request, created, uuid.uuid4().hex)
        text = TextStream(tokenizer.decode, request.stops, OPEN if request.tools else None)
        work = asyncio.ensure_future(self._turns.generate(turn))
        told = 0
        async with aclosing(watch_generation(turn.generation, work, self._keepalive_s)) as arrivals:
            async for news in arrivals:
                if not call.started:
                    await call.start_events()
                    await call.frame(event(chunks.delta({"role": "assistant", "content": ""})))
                new = text.take(turn.generation.output_ids) if news else ""
                if new:
                    frame, told = _delta(chunks, request, tokenizer, turn.generation, new, told)
                    await call.frame(event(frame))
                elif not news:
                    await call.frame(KEEP_ALIVE)
        message = self._answer(request, tokenizer, turn)
        if not call.started:
            await call.start_events()
            await call.frame(event(chunks.delta({"role": "assistant", "content": ""})))
        rest = text.finish(message["content"] or "")
        if rest or (request.logprobs and told < len(turn.generation.output_ids)):
            await call.frame(event(_delta(chunks, request, tokenizer, turn.generation, rest, told)[0]))
        for frame in chunks.tool_calls(message):
            await call.frame(event(frame))
        segment: TokenSegment = await self._turns.record(turn)
        last = b"".join(map(event, chunks.last(turn.generation, message, place_facts(segment))))
        await call.frame(last + DONE, last=True)


def _delta(
    chunks: Chunks,
    request: ChatRequest,
    tokenizer: ChatTokenizer,
    generation: Generation,
    text: str,
    told: int,
) -> tuple[dict[str, Any], int]:
    """A content chunk with the log-probs of all tokens since the last one."""
    if not request.logprobs:
        return chunks.delta({"content": text}), told
    now = len(generation.output_ids)
    return chunks.delta({"content": text}, logprob_content(generation, tokenizer, told, now)), now


def _encode(
    session: Session, place: Place, request: ChatRequest, tokenizer: ChatTokenizer
) -> tuple[Place, list[int], int]:
    """Where the turn really goes, the ids it adds, and the tokens that a full encoding would change."""
    tools, options = request.tools, request.template
    if place.parent is None:
        return place, tokenizer.encode(tokenizer.render(request.messages, tools, options)), 0
    kept = ids_of(session.tokens_of(place)).tolist()
    head = []
    for message in request.messages:
        if message["role"] != "system":
            break
        head.append(message)
    appended = request.messages[place.parent.messages :]
    try:
        tail = tokenizer.suffix(head, appended, tools, options, kept[-1] if kept else None)
        mismatch = tokenizer.verify(kept, tail, request.messages, tools, options)
    except TemplateCannot:
        fresh = Place(None, 0, "incremental_tokenization_failed")
        return fresh, tokenizer.encode(tokenizer.render(request.messages, tools, options)), 0
    return place, tail, mismatch
