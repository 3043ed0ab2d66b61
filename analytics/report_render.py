"""A report drawn: tables for the terminal, and one page without any other file (its charts are inline SVG)."""

from __future__ import annotations

from pathlib import Path

import jinja2
from markupsafe import Markup
from rich.console import Group
from rich.table import Table
from rich.text import Text

from analytics.charts import bar_chart, line_chart, sparkline
from analytics.report_facts import Report

TEMPLATE = "report.html.j2"
ENDS = 10  # steps at either end whose mean reward is compared


def render_html(report: Report) -> str:
    """One page without any other file: charts are inline SVG."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    rewards = [(row.step, row.reward_mean) for row in report.steps if row.reward_mean is not None]
    lags = [(row.step, row.lag_mean) for row in report.steps if row.lag_mean is not None]
    charts = {
        "reward": line_chart(rewards, "optimizer step", "mean reward of the batch"),
        "lag_by_step": line_chart(lags, "optimizer step", "mean lag of the trained tokens"),
        "lag": bar_chart(
            [(str(row.lag), row.tokens) for row in report.lags], "lag (versions)", "trained tokens"
        ),
        "spans": bar_chart(
            [(str(row.version_span), row.trajectories) for row in report.spans],
            "versions in a trajectory",
            "trajectories",
        ),
        "fates": bar_chart(
            [(f"{row.outcome} ({row.reason})", row.verdicts) for row in report.fates], "verdict", "attempts"
        ),
        "drift": bar_chart(
            [(str(row.lag), row.mean_abs) for row in report.lags],
            "lag (versions)",
            "mean |log-prob drift| (nats)",
        ),
    }
    return environment.get_template(TEMPLATE).render(
        report=report, totals=report.totals, charts={name: Markup(chart) for name, chart in charts.items()},  # noqa: S704 — drawn by us
        first=report.reward_of(slice(0, ENDS)), last=report.reward_of(slice(-ENDS, None)), ends=ENDS,
    )  # fmt: skip


def render_console(report: Report) -> Group:
    """Tables for a terminal."""
    totals = report.totals
    rewards = [row.reward_mean for row in report.steps if row.reward_mean is not None]
    first, last = report.reward_of(slice(0, ENDS)), report.reward_of(slice(-ENDS, None))
    lines = [
        f"Run {report.run_id}: {totals.steps} steps, {totals.versions} versions, {totals.groups} groups, {totals.seconds:.0f} s",
        f"reward  {sparkline(rewards)}  first {ENDS}: {_number(first)}, last {ENDS}: {_number(last)}",
        (
            f"{totals.tokens_per_s:.0f} tokens/s, {totals.trajectories_per_min:.0f} trajectories/min, "
            f"{totals.steps_per_min:.1f} steps/min; {totals.output_tokens} tokens generated, {totals.trained_tokens} trained"
        ),
        (
            f"{totals.weight_updates} weight updates cut {totals.preempted} generations; {totals.resumed} went on under "
            f"new weights (pause {_number(totals.pause_ms_mean)} ms)"
        ),
    ]
    return Group(
        *(Text(line) for line in lines),
        _table("Groups", ("verdict", "reason", "attempts", "mean gap"), [
            (row.outcome, row.reason, str(row.verdicts), _number(row.gap_mean)) for row in report.fates]),
        _table("Lag and drift", ("lag", "tokens", "mean drift", "mean |drift|", "p99 |drift|", "max |drift|"), [
            (str(row.lag), str(row.tokens), f"{row.mean:+.2e}", f"{row.mean_abs:.2e}", f"{row.p99_abs:.2e}", f"{row.max_abs:.2e}")
            for row in report.lags]),
        _table("Version spans", ("versions in a trajectory", "trajectories"), [
            (str(row.version_span), str(row.trajectories)) for row in report.spans]),
        Text(f"archive {report.archive}"),
        Text(f"page    {report.html}"),
    )  # fmt: skip


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("verdict", "reason") else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
