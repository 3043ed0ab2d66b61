"""`POST /v1/responses`, whole and streamed; the turn itself is `conversation.py`'s."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from proxy.asgi import KEEP_ALIVE, Call, while_connected
from proxy.conversation import Conversations, Ending, Talk, renamed
from proxy.responses_reply import Events, whole
from proxy.responses_request import NAMES, ResponsesRequest, parse_responses
from proxy.turns import place_facts


class ResponsesApi:
    """OpenAI's Responses, stateless."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    async def responses(self, call: Call) -> None:
        """One turn."""
        received_at = self._conversations.clock()
        limits = self._conversations.limits
        body = await call.json(limits.max_body_bytes)
        with limits.request(), renamed(NAMES):
            await while_connected(call, self._answer(call, body, received_at))

    async def _answer(self, call: Call, body: dict[str, Any], received_at: int) -> None:
        request = parse_responses(body, self._conversations.temperature)
        talk = await self._conversations.begin(call, body, request.chat, "responses", received_at)
        if request.chat.stream:
            await self._stream(call, talk, request)
            return
        segment = await self._conversations.run(talk)
        await call.reply(whole(talk, request, place_facts(segment)))

    async def _stream(self, call: Call, talk: Talk, request: ResponsesRequest) -> None:
        events = Events(talk, request)
        call.frame_error = events.error
        async with aclosing(self._conversations.stream(talk)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Ending):
                    await call.frame(events.end(place_facts(piece.segment)), last=True)
                elif piece.kind == "begin":
                    await call.start_events()
                    await call.frame(events.start())
                elif piece.kind == "idle":
                    await call.frame(KEEP_ALIVE)
                else:
                    await call.frame(events.piece(piece))
