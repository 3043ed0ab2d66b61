"""A training state as files: `model.safetensors`, `optimizer.safetensors` (with the random state) and
`meta.json`.

No pickle: a checkpoint can be read by anything that reads safetensors, and reading one runs no code.
`meta.json` holds the digest of the parameters; a checkpoint whose parameters do not have it is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from schemas.errors import ConfigError, CorruptPayload

MODEL, OPTIMIZER, META = "model.safetensors", "optimizer.safetensors", "meta.json"
RANDOM_STATE = "random_state"


def parameters_digest(parameters: Mapping[str, Tensor]) -> str:
    """sha256 over names in order and the raw bytes of each parameter."""
    digest = hashlib.sha256()
    for name in sorted(parameters):
        tensor = parameters[name].detach().cpu().contiguous().reshape(-1)
        digest.update(name.encode())
        digest.update(tensor.view(torch.uint8).numpy().data)  # the buffer itself, without a copy
    return digest.hexdigest()


def write_checkpoint(
    directory: Path,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    meta: Mapping[str, object],
) -> None:
    """Write all three files into `directory`, which exists."""
    save_file({name: _plain(p) for name, p in parameters.items()}, str(directory / MODEL))
    state = {
        f"{key}.{name}": _plain(value)
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    save_file(state | {RANDOM_STATE: torch.get_rng_state()}, str(directory / OPTIMIZER))
    (directory / META).write_text(json.dumps(dict(meta), indent=1, sort_keys=True) + "\n")


def read_meta(directory: Path) -> dict[str, object]:
    """`meta.json` alone, without loading weights. CorruptPayload when it is not there or not an object."""
    try:
        meta = json.loads((directory / META).read_text())
    except (OSError, ValueError) as error:
        raise CorruptPayload("checkpoint has no readable meta.json", path=str(directory)) from error
    if not isinstance(meta, dict):
        raise CorruptPayload("meta.json of the checkpoint is not an object", path=str(directory))
    return meta


def read_checkpoint(
    directory: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, digest: str
) -> None:
    """Copy the stored state into `parameters`, `optimizer` and torch's generator.

    ConfigError when it is another model's; CorruptPayload when the parameters do not have `digest`.
    """
    stored = load_file(str(directory / MODEL))
    if {n: tuple(t.shape) for n, t in stored.items()} != {n: tuple(p.shape) for n, p in parameters.items()}:
        raise ConfigError("checkpoint is of another model", path=str(directory))
    found = parameters_digest(stored)
    if found != digest:
        raise CorruptPayload("checkpoint parameters differ from their digest", expected=digest, found=found)
    state = load_file(str(directory / OPTIMIZER))
    torch.set_rng_state(state.pop(RANDOM_STATE))
    with torch.no_grad():
        for name, tensor in stored.items():
            parameters[name].copy_(tensor)
    optimizer.state.clear()
    for qualified, tensor in state.items():
        key, name = qualified.split(".", 1)
        # Adam keeps its step counter on the CPU and the moments beside the parameter
        device = "cpu" if key == "step" else parameters[name].device
        optimizer.state[parameters[name]][key] = tensor.to(device)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
