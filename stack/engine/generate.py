"""`/generate`: from a body to a finished or streamed answer, and an abort as soon as the client is gone."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from stack.engine.asgi import Receive, Send, read_body, send_event, send_json, start_events
from stack.engine.contract import GenerateBody, Limits, Refused, decode, to_generation
from stack.engine.generation import Generation
from stack.engine.scheduler import Scheduler
from stack.engine.text import Text


class Generate:
    """Serves `/generate`. `live` are the unfinished requests: an id is unique while it lives."""

    def __init__(
        self, scheduler: Scheduler, limits: Limits, text: Text, *, random_seed: int, incremental: bool
    ) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._text = text
        self._seeds = itertools.count(random_seed << 32)
        self._incremental = incremental
        self.live: dict[str, Generation] = {}

    async def __call__(self, receive: Receive, send: Send) -> None:
        body = decode(await read_body(receive), GenerateBody)
        generation = to_generation(body, self._prompt(body), self._limits, next(self._seeds))
        if generation.rid in self.live:
            raise Refused(f"Duplicate request ID detected: {generation.rid}", field="rid")
        self.live[generation.rid] = generation
        watch = asyncio.ensure_future(receive())  # after the body, the only message left is the disconnect
        watch.add_done_callback(lambda task: self._abandon(task, generation))
        try:
            if generation.stream:
                await self._stream(generation, body, send)
            else:
                await self._answer(generation, body, send)
        finally:
            watch.cancel()
            del self.live[generation.rid]

    def _prompt(self, body: GenerateBody) -> list[int]:
        if body.text is None and body.input_ids is None:
            raise Refused("Either text, input_ids or input_embeds should be provided.", field="input_ids")
        if body.text is not None and body.input_ids is not None:
            raise Refused(
                "Either text, input_ids or input_embeds should be provided, not two of them.", field="text"
            )
        if body.input_ids is not None:
            return body.input_ids
        if not self._text.available:
            raise Refused(
                "The engine initialized with skip_tokenizer_init=True cannot accept text prompts: there is no tokenizer "
                "in the checkpoint directory. Please provide input_ids.",
                field="text",
            )
        return self._text.encode(body.text or "")

    def _abandon(self, watch: asyncio.Task[Any] | asyncio.Future[Any], generation: Generation) -> None:
        if not watch.cancelled() and generation.finish_reason is None:
            self._scheduler.call(lambda: self._scheduler.abort(generation.rid))

    async def _answer(self, generation: Generation, body: GenerateBody, send: Send) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        generation.listener = lambda: None if done.done() else done.set_result(None)
        self._scheduler.submit(generation)
        try:
            await done
        except asyncio.CancelledError:  # the server shuts down
            self._scheduler.call(lambda: self._scheduler.abort(generation.rid))
            raise
        status, payload = self._final(generation, body)
        await send_json(send, status, payload)

    def _final(self, generation: Generation, body: GenerateBody) -> tuple[int, dict[str, Any]]:
        reason = generation.finish_reason or {}
        if reason.get("status_code"):
            return int(reason["status_code"]), {
                "error": {"message": reason["message"], "type": reason["err_type"]}
            }
        return 200, self._chunk(generation, body, 0, len(generation.output_ids), "")

    async def _stream(self, generation: Generation, body: GenerateBody, send: Send) -> None:
        news = asyncio.Event()
        generation.listener = news.set
        self._scheduler.submit(generation)
        sent, text = 0, ""
        await start_events(send)
        while True:
            await news.wait()
            news.clear()
            final = generation.finish_reason is not None  # read before the length: it is written last
            end = len(generation.output_ids) if final else len(generation.logprobs)
            if end > sent or final:
                first = sent if self._incremental else 0
                chunk = self._chunk(generation, body, first, end, text if self._incremental else "")
                text += chunk.get("text", "") if self._incremental else ""
                await send_event(send, chunk, last=final)
                sent = end
            if final:
                return

    def _chunk(
        self, generation: Generation, body: GenerateBody, first: int, end: int, known_text: str
    ) -> dict[str, Any]:
        chunk: dict[str, Any] = {}
        text = self._text.output(generation, end)
        if text is not None:
            chunk["text"] = text[len(known_text) :]
        chunk["output_ids"] = generation.output_ids[first:end]
        chunk["meta_info"] = generation.meta_info(end, first, self._scheduler.version)
        if body.return_prompt_token_ids:
            chunk["prompt_token_ids"] = generation.prompt
        return chunk
