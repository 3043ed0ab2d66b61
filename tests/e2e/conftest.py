"""Small demos that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from demo_run import DemoRun

Start = Callable[..., DemoRun]


@pytest.fixture
def start_demo(tmp_path: Path) -> Iterator[Start]:
    runs: list[DemoRun] = []

    def start(steps: int, *sets: str) -> DemoRun:
        runs.append(DemoRun(tmp_path, steps, *sets))
        return runs[-1]

    yield start
    for run in runs:
        run.stop()
