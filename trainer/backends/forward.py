"""Log-probs and entropies of packed tokens under a causal language model.

Sequences are padded on the right into one [S, T] forward. A causal model never looks to the right, so a
padding token cannot change a real one and no attention mask is needed. Logits are made for trainable tokens
only: with a real vocabulary they, not the layers, fill the memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.packing import PackedBatch


class Forward(NamedTuple):
    """Per packed token [N], float32, 0 where masked; differentiable where gradients are on."""

    logp: Tensor
    entropy: Tensor


def right_padded(batch: PackedBatch) -> Tensor:
    """Tokens as int64 [S, T], padded with 0 on the right."""
    lengths = np.diff(batch.boundaries)
    padded = np.zeros((batch.num_sequences, int(lengths.max())), dtype=np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = batch.tokens
    return torch.from_numpy(padded)


def packed_forward(model: Any, batch: PackedBatch, *, temperature: float, entropy_grad: bool) -> Forward:
    """Log-prob of each trainable token given the tokens before it, at `temperature`, and the entropy there.

    `model` is a transformers causal LM. With `entropy_grad` off the entropy is a metric only and keeps no
    graph.
    """
    device = model.device
    active = np.flatnonzero(batch.mask)
    rows = batch.sequence_ids[active]
    columns = active - batch.boundaries[rows] - 1  # the position whose output predicts the token
    hidden = model.base_model(input_ids=right_padded(batch).to(device), use_cache=False).last_hidden_state
    chosen = hidden[torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)]
    logits = model.get_output_embeddings()(chosen).float() / temperature
    log_softmax = torch.log_softmax(logits, dim=-1)
    targets = torch.from_numpy(batch.tokens[active].astype(np.int64)).to(device)
    logp = log_softmax.gather(1, targets[:, None]).squeeze(1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
    at = torch.from_numpy(active).to(device)
    zeros = torch.zeros(len(batch.tokens), dtype=torch.float32, device=device)
    return Forward(zeros.index_put((at,), logp), zeros.index_put((at,), entropy))
