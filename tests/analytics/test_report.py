"""The report shows what the archive holds, on a page that needs no other file."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from analytics_events import AT, RUN
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from synthetic_run import settings_of, small_run, write_archive

from analytics.charts import bar_chart, line_chart, sparkline
from analytics.report import Report, build_report, render_html, write_report
from analytics.report_facts import FateRow, SpanRow
from schemas import events as ev


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("run")).write()


@pytest.fixture(scope="module")
def report(run_dir: Path) -> Report:
    return build_report(run_dir)


def test_the_numbers_are_those_of_the_run(report: Report) -> None:
    assert [(row.step, row.reward_mean) for row in report.steps] == [(1, 0.75), (2, 0.5)]
    assert [(row.lag, row.tokens, row.mean_abs) for row in report.lags] == [(0, 24, 0.0), (1, 8, 0.25)]
    assert report.spans == (SpanRow(1, 9), SpanRow(2, 2))
    assert report.fates == (
        FateRow("kept", "trained", 4, 0.25),
        FateRow("dropped", "stale", 1, 2.0),
        FateRow("retry", "trajectory_failed", 1, 0.0),
    )
    totals = report.totals
    assert (totals.steps, totals.versions, totals.groups, totals.trajectories) == (2, 3, 5, 11)
    assert (totals.output_tokens, totals.trained_tokens, totals.resumed, totals.seconds) == (38, 32, 2, 9.0)


def test_page_json_and_console_are_written(run_dir: Path) -> None:
    out = io.StringIO()
    report = write_report(run_dir, Console(file=out, width=200))
    page = Path(report.html).read_text(encoding="utf-8")
    assert page == render_html(report)
    assert not re.search(r"""(src|href)=|<script|url\(|@import|https?://""", page)
    assert json.loads(Path(report.html).with_name("report.json").read_text())["totals"]["groups"] == 5
    shown = out.getvalue()
    assert "trajectory_failed" in shown
    assert report.archive in shown
    assert report.html in shown


def test_a_run_that_only_began_has_a_report(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    configured = ev.RunConfigured(
        run_id=RUN,
        occurred_at=AT,
        settings=settings.to_json(),
        settings_digest=settings.digest(),
        software="test",
    )
    write_archive(settings.run_directory, [ev.identified(configured)])
    report = build_report(settings.run_directory)
    assert (report.steps, report.fates, report.totals.seconds) == ((), (), 0.0)
    assert "no data" in render_html(report)


def test_names_are_escaped() -> None:
    chart = bar_chart([("<b>&", 1.0)], "x", "y")
    assert "<b>" not in chart
    ET.fromstring(chart)


@given(st.lists(st.floats(-1e6, 1e6), max_size=200))
def test_charts_are_well_formed_and_inside_their_frame(values: list[float]) -> None:
    line = ET.fromstring(line_chart(list(enumerate(values)), "x", "y"))
    bars = ET.fromstring(bar_chart([(str(i), abs(v)) for i, v in enumerate(values)], "x", "y"))
    for circle in line.iter("circle"):
        assert -0.1 <= float(circle.get("cy", "nan")) <= 240.1
    for rect in bars.iter("rect"):
        assert float(rect.get("height", "nan")) >= 0
    assert len(sparkline(values)) == min(60, len(values))
