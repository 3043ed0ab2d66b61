"""The report of a run: `build_report` asks the archive, `write_report` also writes `report/report.html` and
`report/report.json` into the run's directory and prints it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console

from analytics.report_facts import Report, build_report, html_path
from analytics.report_render import render_console, render_html

__all__ = ["Report", "build_report", "html_path", "render_console", "render_html", "write_report"]


def write_report(run_dir: Path, console: Console | None = None) -> Report:
    """Build it, write `report/report.html` and `report/report.json`, and print it."""
    report = build_report(run_dir)
    page = html_path(run_dir)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render_html(report), encoding="utf-8")
    page.with_name("report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    (console or Console()).print(render_console(report))
    return report
