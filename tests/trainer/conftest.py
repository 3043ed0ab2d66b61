"""One thread for all trainer tests: the tests share their cores, and one thread is what makes sums repeat."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
