"""The engine's ASGI application: `/generate`, the control endpoints, and errors in the contract's two shapes.

The model runs in the scheduler's thread; this event loop only parses, waits and renders. If that thread
dies of a bug, the process ends: a supervisor starts a new engine, whereas a silent one would hold every
client.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import traceback

import torch

from schemas.errors import BadRequest
from stack.engine.asgi import ClientGone, Receive, Scope, Send, send_json
from stack.engine.checkpoint import read_spec
from stack.engine.contract import ContractError, Limits
from stack.engine.control import Control, EngineOptions, load_model
from stack.engine.generate import Generate
from stack.engine.generation import Generation
from stack.engine.scheduler import Scheduler
from stack.engine.text import Text


class Engine:
    """One served checkpoint: an ASGI application that owns its scheduler's thread."""

    def __init__(self, options: EngineOptions) -> None:
        torch.set_num_threads(options.threads)
        spec = read_spec(options.model_path)
        text = Text(options.model_path)
        limits = Limits(
            vocab_size=spec.vocab_size,
            context_length=options.context_length or spec.context_length,
            eos_token_ids=spec.eos_token_ids,
            has_tokenizer=text.available,
            has_experts=spec.experts > 0,
        )
        self._scheduler = Scheduler(
            load_model(options.model_path, spec),
            model_path=str(options.model_path),
            version=options.weight_version,
            max_running=options.max_running,
            min_step_s=options.min_step_ms / 1000.0,
            threads=options.threads,
            prefix_cache_bytes=options.prefix_cache_mb << 20,
            report=self._report,
            match_stop=text.match_stop,
        )
        self._generate = Generate(
            self._scheduler,
            limits,
            text,
            random_seed=options.random_seed,
            incremental=options.incremental_streaming_output,
        )
        self._control = Control(options, spec, limits, self._scheduler)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run_scheduler, name="scheduler", daemon=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry point."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        try:
            if scope["path"] == "/generate" and scope["method"] in ("POST", "PUT"):
                await self._generate(receive, send)
            else:
                await send_json(send, *await self._control(scope, receive))
        except ClientGone:
            return
        except ContractError as error:
            await send_json(send, 400, error.payload())
        except BadRequest as error:
            await send_json(send, error.http_status, {"error": {"message": error.message}})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._scheduler.call(self._scheduler.stop)
        await send({"type": "lifespan.shutdown.complete"})

    def _run_scheduler(self) -> None:
        try:
            self._scheduler.run()
        except BaseException:  # noqa: BLE001  (the thread's boundary: whatever it was, the engine is dead)
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(70)

    def _report(self, news: list[Generation]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(_tell, news)


def _tell(news: list[Generation]) -> None:
    for generation in news:
        if generation.listener is not None:
            generation.listener()
