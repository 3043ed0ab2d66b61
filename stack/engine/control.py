"""The control endpoints of SGLang's contract: abort, pause, weight changes, information.

Each handler takes the raw body and returns a status and a payload; what it changes, it changes through a
command in the scheduler's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from schemas.errors import ConfigError
from stack.engine.asgi import Receive, Scope, read_body
from stack.engine.checkpoint import ModelSpec, read_spec, read_weights
from stack.engine.contract import AbortBody, Limits, PauseBody, UpdateBody, VersionBody, decode
from stack.engine.model import CausalLM
from stack.engine.scheduler import Scheduler, WeightUpdate

Reply = tuple[int, object]
NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Pause with mode=retract or abort, or pass flush_cache=false."
)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the command line decides."""

    model_path: Path
    weight_version: str = "default"
    threads: int = 1
    max_running: int = 128
    context_length: int | None = None
    random_seed: int = 0
    min_step_ms: float = 0.0
    prefix_cache_mb: int = 256
    incremental_streaming_output: bool = False


class Control:
    """Serves every path but `/generate`."""

    def __init__(self, options: EngineOptions, spec: ModelSpec, limits: Limits, scheduler: Scheduler) -> None:
        self._options = options
        self._spec = spec
        self._limits = limits
        self._scheduler = scheduler
        self._started = time.time()
        self._updating = asyncio.Lock()
        self._routes: dict[str, tuple[tuple[str, ...], Callable[[bytes], Awaitable[Reply]]]] = {
            "/abort_request": (("POST",), self._abort),
            "/pause_generation": (("POST",), self._pause),
            "/continue_generation": (("POST",), self._continue),
            "/update_weights_from_disk": (("POST",), self._update_weights),
            "/update_weight_version": (("POST",), self._update_version),
            "/flush_cache": (("GET", "POST"), self._flush),
            "/model_info": (("GET",), self._model_info),
            "/get_model_info": (("GET",), self._model_info),
            "/server_info": (("GET",), self._server_info),
            "/get_server_info": (("GET",), self._server_info),
            "/health": (("GET",), self._health),
            "/health_generate": (("GET",), self._health),
            "/ready": (("GET",), self._health),
            "/v1/models": (("GET",), self._models),
            "/v1/loads": (("GET",), self._loads),
        }

    async def __call__(self, scope: Scope, receive: Receive) -> Reply:
        """Route by path and method."""
        methods, handler = self._routes.get(scope["path"], ((), self._health))
        if not methods:
            return 404, {"detail": "Not Found"}
        if scope["method"] not in methods:
            return 405, {"detail": "Method Not Allowed"}
        return await handler(await read_body(receive))

    async def _abort(self, raw: bytes) -> Reply:
        body = decode(raw, AbortBody)
        rid = None if body.abort_all else body.rid
        if body.abort_all or rid is not None:
            await asyncio.wrap_future(self._scheduler.call(lambda: self._scheduler.abort(rid)))
        return 200, None

    async def _pause(self, raw: bytes) -> Reply:
        mode = decode(raw, PauseBody).mode
        await asyncio.wrap_future(self._scheduler.call(lambda: self._scheduler.pause(mode)))
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    async def _continue(self, raw: bytes) -> Reply:
        await asyncio.wrap_future(self._scheduler.call(self._scheduler.resume))
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    async def _update_weights(self, raw: bytes) -> Reply:
        body = decode(raw, UpdateBody)
        async with self._updating:
            try:
                model = await asyncio.to_thread(load_model, Path(body.model_path), self._spec)
            except ConfigError as error:
                return 400, _outcome(False, f"Failed to update weights: {error.message}")
            update = WeightUpdate(
                model, body.model_path, body.weight_version, body.flush_cache, body.abort_all_requests
            )
            flushed = await asyncio.wrap_future(self._scheduler.update(update))
        if not flushed:
            return 400, _outcome(False, NOT_FLUSHED)
        return 200, _outcome(True, "Succeeded to update model weights.")

    async def _update_version(self, raw: bytes) -> Reply:
        body = decode(raw, VersionBody)
        update = WeightUpdate(None, None, body.new_version, False, body.abort_all_requests)
        await asyncio.wrap_future(self._scheduler.update(update))
        message = f"Weight version updated to {body.new_version}"
        return 200, {"success": True, "message": message, "new_version": body.new_version}

    async def _flush(self, raw: bytes) -> Reply:
        done = await asyncio.wrap_future(self._scheduler.call(self._scheduler.flush_cache))
        return (200, "Cache flushed.\n") if done else (400, "Flush cache failed.\n")

    async def _health(self, raw: bytes) -> Reply:
        return 200, None  # a dead scheduler thread ends the process

    async def _model_info(self, raw: bytes) -> Reply:
        path = self._scheduler.model_path
        return 200, {
            "model_path": path,
            "served_model_name": path,
            "tokenizer_path": str(self._options.model_path) if self._limits.has_tokenizer else None,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self._scheduler.version,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "model_type": self._spec.model_type,
            "architectures": [self._spec.architecture],
            "vocab_size": self._spec.vocab_size,
            "context_length": self._limits.context_length,
        }

    async def _server_info(self, raw: bytes) -> Reply:
        load = await asyncio.wrap_future(self._scheduler.call(self._scheduler.load))
        options = {**asdict(self._options), "model_path": self._scheduler.model_path, "device": "cpu"}
        states = [{**asdict(load), "weight_version": self._scheduler.version}]
        return 200, {
            **options,
            "weight_version": self._scheduler.version,
            "enable_return_routed_experts": self._limits.has_experts,
            "internal_states": states,
            "startup_time": self._started,
            "version": "hoofprint-cpu-engine",
        }

    async def _models(self, raw: bytes) -> Reply:
        card = {
            "id": self._scheduler.model_path,
            "object": "model",
            "created": int(self._started),
            "owned_by": "hoofprint",
            "root": self._scheduler.model_path,
            "max_model_len": self._limits.context_length,
        }
        return 200, {"object": "list", "data": [card]}

    async def _loads(self, raw: bytes) -> Reply:
        load = await asyncio.wrap_future(self._scheduler.call(self._scheduler.load))
        counts = {
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_used_tokens": load.cached_positions,
            "num_steps": load.steps,
        }
        return 200, {"loads": [counts]}


def load_model(directory: Path, expected: ModelSpec) -> CausalLM:
    """Read a checkpoint that can take the place of `expected`; its end tokens and labels may differ."""
    spec = read_spec(directory)
    same = replace(spec, eos_token_ids=expected.eos_token_ids, model_type=expected.model_type)
    if same != expected:
        changed = [name for name, value in asdict(same).items() if value != getattr(expected, name)]
        raise ConfigError(
            f"{directory} has another architecture: {', '.join(changed)} differ.", changed=changed
        )
    with torch.inference_mode():
        return CausalLM(spec, read_weights(directory, spec))


def _outcome(success: bool, message: str) -> dict[str, Any]:
    return {"success": success, "message": message, "num_paused_requests": 0}
