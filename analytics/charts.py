"""Charts as inline SVG text, drawn here so that a report needs no script and no other file. Pure.

Every chart has its numbers in text as well: a `<title>` per mark, labels on the axes, and `role="img"` with a description.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 56
LABEL_Y, LINE = HEIGHT - 40, 13
BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 60


def line_chart(points: Sequence[tuple[float, float]], x_label: str, y_label: str) -> str:
    """A line through (x, y), x rising; y from 0 or the least value to the largest."""
    points = [(x, y) for x, y in points if math.isfinite(y)]
    if not points:
        return _frame("", [], x_label, y_label)
    low_x, high_x = points[0][0], points[-1][0]
    ticks = _ticks(min(0.0, *(y for _, y in points)), max(y for _, y in points))
    at = [(_scale(x, low_x, high_x, LEFT, WIDTH - RIGHT), _height(y, ticks)) for x, y in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    marks = "".join(
        f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="2.5"><title>{_number(px)}: {_number(py)}</title></circle>'
        for (x, y), (px, py) in zip(at, points, strict=True)
    )
    ends = f'<text x="{LEFT}" y="{LABEL_Y}">{_number(low_x)}</text>'
    ends += f'<text class="end" x="{WIDTH - RIGHT}" y="{LABEL_Y}">{_number(high_x)}</text>'
    return _frame(f'<polyline class="line" points="{path}"/>{marks}{ends}', ticks, x_label, y_label)


def bar_chart(bars: Sequence[tuple[str, float]], x_label: str, y_label: str) -> str:
    """One bar per label, from 0."""
    if not bars:
        return _frame("", [], x_label, y_label)
    ticks = _ticks(0.0, max(value for _, value in bars))
    room = (WIDTH - LEFT - RIGHT) / len(bars)
    drawn = []
    for place, (label, value) in enumerate(bars):
        left, top = LEFT + place * room, _height(value, ticks)
        drawn.append(
            f'<rect class="bar" x="{left + room * 0.12:.1f}" y="{top:.1f}" width="{room * 0.76:.1f}" '
            f'height="{max(0.0, HEIGHT - BOTTOM - top):.1f}"><title>{escape(label)}: {_number(value)}</title></rect>'
            + _lines(label, left + room / 2)
        )
    return _frame("".join(drawn), ticks, x_label, y_label)


def _lines(label: str, x: float) -> str:
    """A label under its bar, a line per word."""
    return "".join(
        f'<text class="middle" x="{x:.1f}" y="{LABEL_Y + LINE * row}">{escape(word)}</text>'
        for row, word in enumerate(label.split())
    )


def sparkline(values: Sequence[float]) -> str:
    """Values as one line of text; many are averaged into SPARK_WIDTH places."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(SPARK_WIDTH, len(finite))
    bounds = [place * len(finite) // count for place in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(0.0, *means), max(means)
    return "".join(BLOCKS[round(_scale(mean, low, high, 0, len(BLOCKS) - 1))] for mean in means)


def _frame(inside: str, ticks: Sequence[float], x_label: str, y_label: str) -> str:
    lines = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_height(tick, ticks):.1f}" y2="{_height(tick, ticks):.1f}"/>'
        f'<text class="end" x="{LEFT - 6}" y="{_height(tick, ticks) + 4:.1f}">{_number(tick)}</text>'
        for tick in ticks
    )
    empty = "" if inside else f'<text class="middle" x="{WIDTH / 2}" y="{HEIGHT / 2}">no data</text>'
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)} by {escape(x_label)}">'
        f"{lines}{inside}{empty}"
        f'<text class="middle" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">{escape(x_label)}</text>'
        f'<text class="middle" transform="translate(12 {middle}) rotate(-90)">{escape(y_label)}</text></svg>'
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose [low, high], about four of them."""
    if high - low < 1e-12:
        high = low + 1.0
    raw = (high - low) / 4
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * place for place in range(first, last + 1)]


def _height(value: float, ticks: Sequence[float]) -> float:
    return _scale(value, ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)


def _scale(value: float, low: float, high: float, start: float, stop: float) -> float:
    share = (value - low) / (high - low) if high > low else 0.5
    return start + share * (stop - start)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
