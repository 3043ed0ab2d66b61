"""Rule 6, `mask_nonlast_version_tokens`: only tokens of the last trainable token's version keep their loss."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def mask_nonlast_version_tokens(mask: NDArray[np.uint8], codes: NDArray[np.int32]) -> NDArray[np.uint8]:
    """New loss mask of one sequence.

    `mask` [T]: 1 where the token is trainable. `codes` [T]: one number per real version, negative where the token has
    no real version (context, unknown). At most one distinct real version at trainable positions: unchanged. Otherwise
    a position stays only if its version is that of the last trainable token with a real version.
    """
    versioned = codes[(mask != 0) & (codes >= 0)]
    if versioned.size == 0 or np.all(versioned == versioned[0]):
        return mask
    return np.where(codes == versioned[-1], mask, 0).astype(np.uint8)
