"""`POST /v1/messages`, whole and streamed, and `/v1/messages/count_tokens`; the turn itself is `conversation.py`'s."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from proxy.api_fields import COUNT_TOKENS
from proxy.asgi import Call, while_connected
from proxy.conversation import Conversations, Ending, Talk, renamed
from proxy.messages_reply import PING, Events, error_event, whole
from proxy.messages_request import parse_messages
from proxy.turns import place_facts

_NAMES = {"response_format": "output_config.format", "stop": "stop_sequences"}


class MessagesApi:
    """Anthropic's Messages."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    async def messages(self, call: Call) -> None:
        """One turn."""
        received_at = self._conversations.clock()
        limits = self._conversations.limits
        call.frame_error = error_event
        body = await call.json(limits.max_body_bytes)
        with limits.request(), renamed(_NAMES):
            await while_connected(call, self._answer(call, body, received_at))

    async def count_tokens(self, call: Call) -> None:
        """Tokens of the whole conversation as a first request would send them; no session, no record."""
        limits = self._conversations.limits
        body = await call.json(limits.max_body_bytes)
        self._conversations.check_caller(call, body)
        with limits.request():
            request = parse_messages(body, self._conversations.temperature, COUNT_TOKENS)
            tokenizer = await self._conversations.tokenizers.get()
            ids = tokenizer.prompt(request.messages, request.tools, request.template)
        await call.reply({"input_tokens": len(ids)})

    async def _answer(self, call: Call, body: dict[str, Any], received_at: int) -> None:
        request = parse_messages(body, self._conversations.temperature)
        talk = await self._conversations.begin(call, body, request, "messages", received_at)
        if request.stream:
            await self._stream(call, talk)
            return
        segment = await self._conversations.run(talk)
        await call.reply(whole(talk, place_facts(segment)))

    async def _stream(self, call: Call, talk: Talk) -> None:
        events = Events(talk)
        async with aclosing(self._conversations.stream(talk)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Ending):
                    await call.frame(events.end(place_facts(piece.segment)), last=True)
                elif piece.kind == "begin":
                    await call.start_events()
                    await call.frame(events.start())
                elif piece.kind == "idle":
                    await call.frame(PING)
                elif piece.text:
                    await call.frame(events.delta(piece.kind, piece.text))
