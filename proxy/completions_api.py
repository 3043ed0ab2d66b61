"""`POST /v1/completions`: a prompt as text or token ids, its continuation as text; whole and streamed.

Without a conversation the tokens decide the lineage. A text prompt that begins with the text of a recorded step goes on
from that step's tokens, and only what follows is encoded: what the engine produced is never encoded again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from proxy.api_fields import COMPLETIONS
from proxy.asgi import DONE, KEEP_ALIVE, Call, event, while_connected
from proxy.chat_reply import usage
from proxy.chat_request import ChatRequest, parse_options
from proxy.conversation import Conversations, Ending, Talk, renamed
from proxy.routing import Lineage, Place, Step, place_tokens
from proxy.sessions import Session
from proxy.tito import ChatTokenizer
from proxy.turns import place_facts
from schemas.errors import BadRequest
from schemas.tokens import ids_of, pack_ids

_DEFAULT_TOKENS = 16
_NAMES = {"input_ids": "prompt"}


class CompletionsApi:
    """OpenAI's text completions."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    async def completions(self, call: Call) -> None:
        """One turn."""
        received_at = self._conversations.clock()
        limits = self._conversations.limits
        body = await call.json(limits.max_body_bytes)
        with limits.request(), renamed(_NAMES):
            await while_connected(call, self._complete(call, body, received_at))

    async def _complete(self, call: Call, body: dict[str, Any], received_at: int) -> None:
        request, prompt = parse_completion(body, self._conversations.temperature)
        talk = await self._begin(call, body, request, prompt, received_at)
        if request.stream:
            await self._stream(call, talk)
            return
        segment = await self._conversations.run(talk)
        logprobs = _logprobs(talk, 0, len(talk.generation.output_ids))
        whole = _frame(talk, talk.message["content"], logprobs, _finish(talk))
        await call.reply({**whole, "usage": usage(talk.generation), "hoofprint": place_facts(segment)})

    async def _begin(
        self,
        call: Call,
        body: dict[str, Any],
        request: ChatRequest,
        prompt: str | list[int],
        received_at: int,
    ) -> Talk:
        conversations = self._conversations
        tokenizer = await conversations.tokenizers.get()
        session, one_call = await conversations.enter(call, body, request.ignored)
        place, context = _place(session, prompt, tokenizer)
        turn = conversations.turn(session, place, context, request, tokenizer, "completions", received_at)
        turn.digest = hashlib.sha256(turn.generation.prompt.tobytes()).hexdigest()
        conversations.identify(call, body, turn, one_call=one_call)
        return Talk(request, tokenizer, turn, received_at // 1_000_000)

    async def _stream(self, call: Call, talk: Talk) -> None:
        async with aclosing(self._conversations.stream(talk)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Ending):
                    last = {
                        **_frame(talk, "", None, _finish(talk)),
                        "hoofprint": place_facts(piece.segment),
                    }
                    frames = event(last)
                    if talk.request.include_usage:
                        counts = {**_frame(talk, "", None, None), "choices": []}
                        frames += event({**counts, "usage": usage(talk.generation)})
                    await call.frame(frames + DONE, last=True)
                elif piece.kind == "begin":
                    await call.start_events()
                elif piece.kind == "idle":
                    await call.frame(KEEP_ALIVE)
                else:
                    logprobs = _logprobs(talk, piece.first, piece.stop)
                    await call.frame(event(_frame(talk, piece.text, logprobs, None)))


def parse_completion(body: dict[str, Any], temperature: float) -> tuple[ChatRequest, str | list[int]]:
    """BadRequest names the field."""
    COMPLETIONS.check(body)
    prompt = body["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    whole = isinstance(prompt, list) and all(type(i) is int and 0 <= i < 2**31 for i in prompt)
    if not prompt or not (isinstance(prompt, str) or whole):
        raise BadRequest("prompt must be one text or one list of token ids, not empty", field="prompt")
    wanted = body.get("logprobs")
    options = COMPLETIONS.named(body) | {"logprobs": wanted is not None, "top_logprobs": wanted}
    request = parse_options(options, temperature)
    request.ignored = COMPLETIONS.unknown(body)
    if request.max_tokens is None:
        request.max_tokens = _DEFAULT_TOKENS
    return request, prompt


def _place(session: Session, prompt: str | list[int], tokenizer: ChatTokenizer) -> tuple[Place, list[int]]:
    if isinstance(prompt, str):
        step = _step_of_text(session.lineages, prompt, tokenizer)
        if step is not None:
            return Place(step[0], step[0].end, None), tokenizer.encode(prompt[step[1] :])
        prompt = tokenizer.encode(prompt)
    packed = pack_ids(prompt)
    place = place_tokens(session.lineages, packed)
    return place, ids_of(packed[4 * place.prefix :]).tolist()


def _step_of_text(
    lineages: Sequence[Lineage], prompt: str, tokenizer: ChatTokenizer
) -> tuple[Step, int] | None:
    """The longest step whose text the prompt begins with and goes beyond, and the length of that text."""
    best: tuple[Step, int] | None = None
    for lineage in reversed(lineages):
        for step in reversed(lineage.steps):
            if best is not None and step.end <= best[0].end:
                break
            text = tokenizer.text(ids_of(bytes(lineage.tokens[: 4 * step.end])).tolist())
            if len(text) < len(prompt) and prompt.startswith(text):
                best = step, len(text)
                break
    return best


def _finish(talk: Talk) -> str:
    return "length" if talk.generation.finish.get("type") == "length" else "stop"


def _logprobs(talk: Talk, first: int, stop: int) -> dict[str, Any] | None:
    """The older form: four parallel lists."""
    if not talk.request.logprobs:
        return None
    generation, tokenizer = talk.generation, talk.tokenizer
    ids, tops = generation.output_ids, generation.top_logprobs
    texts = [tokenizer.token_text(token) for token in ids[first:stop]]
    alternatives: list[dict[str, float] | None] = [
        {tokenizer.token_text(top[1]): top[0] for top in tops[at]} if at < len(tops) and tops[at] else None
        for at in range(first, stop)
    ]
    offset = sum(len(tokenizer.token_text(token)) for token in ids[:first])
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": list(generation.logprobs[first:stop]),
        "top_logprobs": alternatives if talk.request.top_logprobs else None,
        "text_offset": offsets,
    }


def _frame(talk: Talk, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
    return {
        "id": f"cmpl-{talk.name}",
        "object": "text_completion",
        "created": talk.created,
        "model": talk.request.model,
        "choices": [choice],
    }
