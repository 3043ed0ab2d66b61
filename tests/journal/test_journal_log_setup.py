"""Log lines: JSON on stderr, ours and the libraries', errors with their code and detail."""

from __future__ import annotations

import json
import subprocess
import sys

SAY = """
import logging, structlog
from journal.log_setup import configure_logging
from schemas.errors import StoreError
configure_logging("probe")
structlog.get_logger().error("it_failed", error=StoreError("the disk is full", errno=28))
logging.getLogger("some.library").warning("library says %s", "so")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("unforeseen")
"""


def test_every_line_is_one_json_object_with_the_process_name() -> None:
    said = subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, check=True)
    ours, library, trace = (json.loads(line) for line in said.stderr.splitlines())
    assert said.stdout == ""
    assert {line["process"] for line in (ours, library, trace)} == {"probe"}
    assert (ours["event"], ours["error"], ours["code"], ours["detail"]) == (
        "it_failed", "the disk is full", "store_error", {"errno": 28},
    )  # fmt: skip
    assert (library["event"], library["level"]) == ("library says so", "warning")
    assert "ZeroDivisionError" in trace["exception"]
