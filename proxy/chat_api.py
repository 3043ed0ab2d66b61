"""`POST /v1/chat/completions`, whole and streamed; the turn itself is `conversation.py`'s."""

from __future__ import annotations

import uuid
from contextlib import aclosing
from typing import Any

from proxy.asgi import DONE, KEEP_ALIVE, Call, event, while_connected
from proxy.chat_reply import Chunks, completion, logprob_content
from proxy.chat_request import parse_chat
from proxy.conversation import Conversations, Ending, Talk
from proxy.turns import place_facts


class ChatApi:
    """Chat completions."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    async def completions(self, call: Call) -> None:
        """One turn."""
        received_at = self._conversations.clock()
        limits = self._conversations.limits
        body = await call.json(limits.max_body_bytes)
        with limits.request():
            await while_connected(call, self._complete(call, body, received_at))

    async def _complete(self, call: Call, body: dict[str, Any], received_at: int) -> None:
        request = parse_chat(body, self._conversations.temperature)
        talk = await self._conversations.begin(call, body, request, "chat", received_at)
        if request.stream:
            await self._stream(call, talk)
            return
        segment = await self._conversations.run(talk)
        await call.reply(
            completion(
                request, talk.generation, talk.tokenizer, talk.message, talk.created, place_facts(segment)
            )
        )

    async def _stream(self, call: Call, talk: Talk) -> None:
        request = talk.request
        chunks = Chunks(request, talk.created, uuid.uuid4().hex)
        async with aclosing(self._conversations.stream(talk)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Ending):
                    frames = chunks.tool_calls(talk.message)
                    frames += chunks.last(talk.generation, talk.message, place_facts(piece.segment))
                    await call.frame(b"".join(map(event, frames)) + DONE, last=True)
                elif piece.kind == "begin":
                    await call.start_events()
                    await call.frame(event(chunks.delta({"role": "assistant", "content": ""})))
                elif piece.kind == "idle":
                    await call.frame(KEEP_ALIVE)
                else:
                    name = "content" if piece.kind == "content" else "reasoning_content"
                    logprobs = None
                    if request.logprobs:
                        logprobs = logprob_content(talk.generation, talk.tokenizer, piece.first, piece.stop)
                    await call.frame(event(chunks.delta({name: piece.text}, logprobs)))
