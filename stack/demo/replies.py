"""First and last replies of a chat demo side by side, from the workers' own answer logs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import orjson
from rich.table import Table

SHOWN = 6
AMONG = 32
"""Shown evenly from so many at either end: the very first to arrive are the shortest."""


def replies(run_directory: Path) -> list[str]:
    """Texts of all chat answers in the order in which the workers received them."""
    texts: list[str] = []
    for path in sorted((run_directory / "answers").glob("*.jsonl")):
        records = (orjson.loads(line) for line in path.read_bytes().splitlines())
        texts += [record["text"] for record in records if record["kind"] == "text"]
    return texts


def side_by_side(texts: Iterable[str]) -> Table:
    """The first ones to the left, the last ones to the right; each in one line."""
    lines = [" ".join(text.split()) for text in texts]
    table = Table(title="first and last replies")
    table.add_column("before training", overflow="fold")
    table.add_column("after training", overflow="fold")
    for first, last in zip(_evenly(lines[:AMONG]), _evenly(lines[-AMONG:]), strict=True):
        table.add_row(first, last)
    return table


def _evenly(lines: list[str]) -> list[str]:
    return [lines[i * len(lines) // SHOWN] for i in range(SHOWN)] if len(lines) >= SHOWN else lines
