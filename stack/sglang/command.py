"""How SGLang is made to serve on CPU: its flags and its environment variables. Pure but for a look into the checkpoint.

Every flag replaces something that needs a GPU, or bounds memory. float32 always: matrix products in bfloat16 run at a
hundredth of the speed where the CPU has no instructions for them, and log-probs would not be the trainer's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from schemas.errors import ConfigError

MOST_TOKENS: Final = 65_536
"""Positions of the key-value cache at the most: its memory is taken at the start."""
_CPU = (
    "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--disable-overlap-schedule", "--cuda-graph-backend-decode", "disabled",
    "--cuda-graph-backend-prefill", "disabled", "--mem-fraction-static", "0.1", "--skip-server-warmup",
)  # fmt: skip
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True, slots=True)
class Options:
    """What the launcher's command line decides; 0: what the checkpoint says."""

    model_path: Path
    port: int
    host: str = "127.0.0.1"
    weight_version: str = "default"
    threads: int = 1
    max_running: int = 128
    context_length: int = 0
    random_seed: int = 0
    incremental_streaming_output: bool = False


def arguments(options: Options) -> list[str]:
    """The command line after the interpreter. ConfigError: the directory holds no checkpoint."""
    context = options.context_length or context_of(options.model_path)
    tokens = max(context, min(MOST_TOKENS, options.max_running * context))
    argv = ["-m", "sglang.launch_server", "--model-path", str(options.model_path)]
    argv += ["--host", options.host, "--port", str(options.port), *_CPU, "--log-level", "warning"]
    argv += ["--weight-version", options.weight_version, "--random-seed", str(options.random_seed)]
    argv += ["--max-running-requests", str(options.max_running), "--max-total-tokens", str(tokens)]
    argv += ["--context-length", str(context)]
    if any((options.model_path / name).exists() for name in _TOKENIZER):
        argv += ["--grammar-backend", "xgrammar"]
    else:  # ids in, ids out: neither text, nor stop strings, nor grammars
        argv += ["--skip-tokenizer-init", "--grammar-backend", "none"]
    if has_experts(options.model_path):
        argv.append("--enable-return-routed-experts")
    if options.incremental_streaming_output:
        argv.append("--incremental-streaming-output")
    return argv


def environment(options: Options) -> dict[str, str]:
    """Variables that SGLang reads."""
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
        "OMP_NUM_THREADS": str(options.threads),
        "MKL_NUM_THREADS": str(options.threads),
        "OMP_WAIT_POLICY": "passive",
        "SGLANG_TIMEOUT_KEEP_ALIVE": "120",  # else idle pooled connections are cut after 5 s
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else every /health generates a token and takes a second
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def context_of(checkpoint: Path) -> int:
    """Positions that the checkpoint has. ConfigError: no config.json that says so."""
    try:
        return int(_config(checkpoint)["max_position_embeddings"])
    except (ValueError, KeyError) as missing:
        raise _no_checkpoint(checkpoint, missing) from missing


def has_experts(checkpoint: Path) -> bool:
    """Whether it is a mixture of experts. ConfigError: no config.json."""
    config = _config(checkpoint)
    return bool(config.get("num_experts") or config.get("num_local_experts"))


def _config(checkpoint: Path) -> dict[str, Any]:
    try:
        return dict(orjson.loads((checkpoint / "config.json").read_bytes()))
    except (OSError, ValueError, TypeError) as missing:
        raise _no_checkpoint(checkpoint, missing) from missing


def _no_checkpoint(checkpoint: Path, why: Exception) -> ConfigError:
    return ConfigError(f"{checkpoint} is no checkpoint that SGLang could serve: {why}", model=str(checkpoint))
