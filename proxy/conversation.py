"""One turn of a conversation, whichever API it came through: prompt, generation, answer, record, and its pieces as they come.

Every agent-facing API maps its request to `ChatRequest` and its answer from the assistant's message made here, so that
lineages, digests and tokens do not depend on the API. The conversation decides the lineage; the prompt is the lineage's
own tokens plus the encoding of what was appended. The log has, per turn, only the messages it added, so a restarted
proxy can follow the conversation at linear cost. Invariant: what ends an answer is given only when the record is in the log.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import orjson
import structlog
from numpy.typing import NDArray

from proxy.asgi import Call
from proxy.chat_reply import assistant_message, final_text
from proxy.chat_request import ChatRequest
from proxy.detokenize import TextStream
from proxy.engine_refusals import CHAT_FIELDS, naming_fields
from proxy.forced_calls import PARAMETER, call_grammar
from proxy.generation import Generation, known
from proxy.limits import Limits
from proxy.metrics import Metrics
from proxy.reply_sections import THINK, SectionStream
from proxy.routing import Place, chain_of, next_link, place_messages, place_tokens, request_digest
from proxy.session_access import SessionAccess
from proxy.sessions import Session
from proxy.streaming import Pace, watch_generation
from proxy.tito import ChatTokenizer, TemplateCannot, Tokenizers
from proxy.tool_calls import OPEN
from proxy.turn import Turn
from proxy.turns import Turns, end_of, text_field
from schemas.errors import HoofprintError
from schemas.events import EndFacts, TokenSegment
from schemas.tokens import ids_of, pack_ids

log = structlog.get_logger(__name__)

_ONE_CALL = EndFacts(segment_count=0, status="completed", reason="single_call")
_PROMPT_END = 16
"""Tokens at a prompt's end in which an opened `<think>` is looked for."""


@dataclass(slots=True, eq=False)
class Talk:
    """A turn with what its answer needs. `inside`: the prompt has opened the reasoning. `created`: seconds."""

    request: ChatRequest
    tokenizer: ChatTokenizer
    turn: Turn
    created: int
    inside: bool = False
    thinks: bool = False
    message: dict[str, Any] = field(default_factory=dict)
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def generation(self) -> Generation:
        """The turn's generation."""
        return self.turn.generation

    def answer(self) -> dict[str, Any]:
        """The assistant's message; the turn learns the conversation behind it."""
        generation, request = self.generation, self.request
        text = final_text(generation, self.tokenizer, request.stops)
        self.message = assistant_message(
            text, request.tools, generation.rid, thinks=self.thinks, inside=self.inside
        )
        self.turn.response = orjson.dumps(self.message).decode()
        if self.turn.chain:
            self.turn.chain = next_link(self.turn.chain, self.message)
        return self.message


@dataclass(slots=True, frozen=True)
class Piece:
    """What a stream may show. `begin`: the generation runs; `idle`: keep alive; `[first, stop)`: output tokens it covers."""

    kind: Literal["begin", "idle", "reasoning", "content"]
    text: str = ""
    first: int = 0
    stop: int = 0


@dataclass(slots=True, frozen=True)
class Ending:
    """The answer is in the log."""

    segment: TokenSegment


class Conversations:
    """Runs turns of conversations."""

    def __init__(
        self, access: SessionAccess, turns: Turns, limits: Limits, metrics: Metrics, tokenizers: Tokenizers,
        pace: Pace,
    ) -> None:  # fmt: skip
        self._access = access
        self._turns = turns
        self._metrics = metrics
        self._pace = pace
        self.limits = limits
        self.tokenizers = tokenizers
        self.temperature = turns.temperature
        self.clock = turns.clock

    # -- before --------------------------------------------------------------------------------------

    async def begin(
        self, call: Call, body: dict[str, Any], request: ChatRequest, api: str, received_at: int
    ) -> Talk:
        """The turn of a request in its session."""
        tokenizer = await self.tokenizers.get()
        session, one_call = await self.enter(call, body, request.ignored)
        chain = chain_of(request.tools, request.messages, session.links)
        place = place_messages(session.by_chain, chain, session.known_tools)
        session.known_tools.add(chain[0])
        place, context, mismatch = _encode(session, place, request, tokenizer)
        turn = self.turn(session, place, context, request, tokenizer, api, received_at)
        known = place.parent.messages if place.parent is not None else 0
        recorded: dict[str, Any] = {"messages": request.messages[known:]}
        if place.parent is None and request.tools:
            recorded["tools"] = request.tools
        turn.request = orjson.dumps(recorded).decode()
        turn.digest = request_digest(chain)
        turn.chain, turn.messages = chain[-1], len(request.messages) + 1
        turn.find = lambda session: place_messages(session.by_chain, chain, session.known_tools)
        turn.mismatch_tokens = mismatch
        self.identify(call, body, turn, one_call=one_call)
        inside = tokenizer.thinks and _opened(turn.generation.prompt, tokenizer)
        return Talk(request, tokenizer, turn, received_at // 1_000_000, inside, tokenizer.thinks)

    def check_caller(self, call: Call, body: dict[str, Any]) -> None:
        """Unauthorized, for a call that needs no session."""
        self._access.identify(call, body)

    async def enter(self, call: Call, body: dict[str, Any], ignored: list[str]) -> tuple[Session, bool]:
        """The session; advisory fields are counted, and each named once per session in the log."""
        session, one_call = await self._access.session_for(call, body)
        for name in ignored:
            self._metrics.ignored(name)
        new = sorted(set(ignored) - session.named_fields)
        if new:
            session.named_fields.update(new)
            log.info(
                "advisory_fields_ignored",
                session_id=session.identity.session_id,
                fields=[name[:64] for name in new[:64]],
            )
        return session, one_call

    def identify(self, call: Call, body: dict[str, Any], turn: Turn, *, one_call: bool) -> None:
        """The turn's name, and the end that comes with it."""
        turn.turn_id = text_field(call, body, "x-turn-id", "turn_id")
        turn.end = end_of(body, turn.generation.session.identity.kind) or (_ONE_CALL if one_call else None)

    def turn(
        self, session: Session, place: Place, context: list[int], request: ChatRequest, tokenizer: ChatTokenizer,
        api: str, received_at: int,
    ) -> Turn:  # fmt: skip
        """A turn at a place. BadRequest, ContextOverflow."""
        if context or not place.prefix:
            self._turns.check_ids(context)  # what the lineage has was checked when it came
        added = pack_ids(context)
        prompt = ids_of(session.tokens_of(place) + added)
        budget = self._turns.budget(session, len(prompt), request.max_tokens)
        sampling = dict(request.sampling)
        if tokenizer.eos_token_id is not None and not sampling.get("ignore_eos"):
            sampling["stop_token_ids"] = sorted({*sampling.get("stop_token_ids", ()), tokenizer.eos_token_id})
        if request.forced:
            inside = tokenizer.thinks and _opened(prompt, tokenizer)
            sampling[PARAMETER] = call_grammar(
                request.forced, several=request.several, thinks=tokenizer.thinks, inside=inside
            )
        generation = Generation(
            session, prompt, sampling, budget, streams=request.stream, tops=request.top_logprobs
        )
        generation.decoder = known(tokenizer.decode)
        return Turn(
            api=api,
            generation=generation,
            place=place,
            context_ids=added,
            digest="",
            sampling=orjson.dumps({**sampling, "max_new_tokens": budget}).decode(),
            received_at=received_at,
            check=self._turns.checker(generation),
            find=lambda session: place_tokens(session.lineages, pack_ids(prompt)),
        )

    # -- whole ---------------------------------------------------------------------------------------

    async def run(self, talk: Talk) -> TokenSegment:
        """Generate, answer (`talk.message`), record."""
        with naming_fields(CHAT_FIELDS, talk.generation.sampling):
            await self._turns.generate(talk.turn)
        talk.answer()
        return await self._turns.record(talk.turn)

    # -- stream --------------------------------------------------------------------------------------

    async def stream(self, talk: Talk) -> AsyncGenerator[Piece | Ending, None]:
        """Pieces as they become certain, then, acknowledged, the ending. Leaving early aborts the generation."""
        generation, request = talk.generation, talk.request
        text = TextStream(talk.tokenizer.decode, request.stops, None)
        sections = SectionStream(
            thinks=talk.thinks, inside=talk.inside, marker=OPEN if request.tools else None
        )
        work = asyncio.ensure_future(self._turns.generate(talk.turn))
        begun, told = False, 0
        with naming_fields(CHAT_FIELDS, talk.generation.sampling):
            async with aclosing(watch_generation(generation, work, self._pace)) as arrivals:
                async for news in arrivals:
                    if not begun:
                        begun = True
                        yield Piece("begin")
                    new = text.take(generation.output_ids) if news else ""
                    if not news:
                        yield Piece("idle")
                    for part, shown in sections.feed(new) if new else ():
                        now = len(generation.output_ids)
                        yield Piece(part, shown, told, now)
                        told = now
        message = talk.answer()
        if not begun:
            yield Piece("begin")
        count = len(generation.output_ids)
        for part, shown in sections.finish(message.get("reasoning_content") or "", message["content"] or ""):
            yield Piece(part, shown, told, count)
            told = count
        if request.logprobs and told < count:
            yield Piece("content", "", told, count)
        async for last in self._recorded(talk):
            yield last

    async def _recorded(self, talk: Talk) -> AsyncGenerator[Piece | Ending, None]:
        recording = asyncio.ensure_future(self._turns.record(talk.turn))
        try:
            while not (await asyncio.wait((recording,), timeout=self._pace.keepalive_s))[0]:
                yield Piece("idle")
            yield Ending(recording.result())
        finally:
            recording.cancel()  # nothing if it has landed; the record itself is followed to its end all the same


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals name the field as this API calls it."""
    try:
        yield
    except HoofprintError as refused:
        name = refused.detail.get("field")
        if isinstance(name, str) and name in names:
            refused.detail["field"] = names[name]
            refused.message = refused.message.replace(name, names[name])
        raise


def _opened(prompt: NDArray[np.int32], tokenizer: ChatTokenizer) -> bool:
    return tokenizer.text(prompt[-_PROMPT_END:].tolist()).rstrip().endswith(THINK)


def _encode(
    session: Session, place: Place, request: ChatRequest, tokenizer: ChatTokenizer
) -> tuple[Place, list[int], int]:
    """Where the turn really goes, the ids it adds, and the tokens that encoding its parent's answer anew would change."""
    messages, tools, options = request.messages, request.tools, request.template
    if place.parent is not None:
        answered = place.parent.output
        end = ids_of(session.tokens_of(place))[-max(answered, 1) :].tolist()
        try:
            added = tokenizer.append(end, answered, place.parent.messages, messages, tools, options)
        except TemplateCannot as cannot:
            place = Place(None, 0, cannot.reason)
        else:
            return place, added.ids, added.mismatch
    return place, tokenizer.prompt(messages, tools, options), 0
