"""The one form of every result: a figure, ours, the reference, their ratio, the goal, and whether it holds."""

from __future__ import annotations

import json
import operator
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "==": operator.eq}


@dataclass(frozen=True)
class Figure:
    """`goal` is a comparison with a number, such as `<= 8`; it is checked against `ours`. `reference` may be absent."""

    figure: str
    unit: str
    ours: float
    goal: str | None = None
    reference: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if self.goal is None:
            return None
        sign, number = self.goal.split()
        return bool(COMPARE[sign](self.ours, float(number)))

    @property
    def ratio(self) -> float | None:
        """Ours over the reference."""
        return self.ours / self.reference if self.reference else None


def publish(name: str, figures: list[Figure], note: str = "") -> None:
    """Print the table and write `results/<name>.json`."""
    table = Table(
        "figure", "unit", "ours", "reference", "ratio", "goal", "holds", title=name, caption=note or None
    )
    rows = []
    for figure in figures:
        row = asdict(figure) | {"ratio": figure.ratio, "holds": figure.holds}
        rows.append(row)
        table.add_row(
            *(_cell(row[key]) for key in ("figure", "unit", "ours", "reference", "ratio", "goal", "holds")),
        )
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(
        json.dumps({"name": name, "note": note, "rows": rows}, indent=1) + "\n"
    )


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
