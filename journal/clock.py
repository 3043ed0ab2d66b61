"""Time as a constructor argument: UTC microseconds, so that tests and replay bring their own."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]


def system_clock() -> int:
    """UTC microseconds now."""
    return time.time_ns() // 1000
