"""`hoofprint sql`: one query, a named query, or a small shell over a run's archive."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import duckdb
import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analytics.catalog import connect, query_names, query_text
from schemas.errors import ArchiveError

MAX_ROWS = 200
PROMPT = "hoofprint> "
_LONGEST = 120
"""Characters of a cell."""
_BYTES = 32
"""Bytes of a value that are shown."""


def run_query(run_dir: Path, query: str) -> pa.Table:
    """Rows of a named query or of SQL text. Raises ArchiveError with DuckDB's own words when it is wrong."""
    connection = connect(run_dir)
    try:
        return execute(connection, query)
    finally:
        connection.close()


def execute(connection: duckdb.DuckDBPyConnection, query: str) -> pa.Table:
    """The same on an open connection. A statement without rows gives an empty table."""
    text = (
        query_text(query.strip())
        if query.strip().isidentifier() and query.strip() in query_names()
        else query
    )
    try:
        answer = connection.sql(text)
        return pa.table({}) if answer is None else answer.to_arrow_table()
    except duckdb.Error as wrong:
        raise ArchiveError(f"the query failed: {wrong}", query=query) from wrong


def rich_table(rows: pa.Table, title: str | None = None) -> Table:
    """For the console: numbers to the right, long texts cut, at most MAX_ROWS rows."""
    shown = Table(title=title, show_lines=False)
    for field in rows.schema:
        numeric = (
            pa.types.is_integer(field.type)
            or pa.types.is_floating(field.type)
            or pa.types.is_decimal(field.type)
        )
        shown.add_column(field.name, justify="right" if numeric else "left", overflow="fold")
    for row in rows.slice(0, MAX_ROWS).to_pylist():
        shown.add_row(*(Text(_text(value)) for value in row.values()))
    return shown


def sql_shell(run_dir: Path, console: Console | None = None, lines: Iterable[str] | None = None) -> None:
    """Read statements ended by `;` (or a query's name) until end of input or `exit`; errors are shown, not fatal."""
    console = console or Console()
    connection = connect(run_dir)
    console.print(f"named queries: {', '.join(query_names())}; `tables` lists the relations, `exit` leaves")
    gathered = ""
    try:
        for line in _prompted(console) if lines is None else lines:
            word = line.strip().rstrip(";")
            if not gathered and word in ("exit", "quit"):
                return
            gathered += line + "\n"
            if not (line.rstrip().endswith(";") or gathered.strip() in ("tables", *query_names())):
                continue
            statement, gathered = gathered.strip(), ""
            _answer(console, connection, "SHOW TABLES" if word == "tables" else statement)
    finally:
        connection.close()


def _answer(console: Console, connection: duckdb.DuckDBPyConnection, statement: str) -> None:
    try:
        rows = execute(connection, statement)
    except ArchiveError as wrong:
        console.print(wrong.message, style="red", markup=False)
        return
    console.print(rich_table(rows))
    if rows.num_rows > MAX_ROWS:
        console.print(f"{rows.num_rows} rows, the first {MAX_ROWS} shown")


def _prompted(console: Console) -> Iterable[str]:
    while True:
        try:
            yield console.input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            return


def _text(value: object) -> str:
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(_readable(value))
    text = text.replace("\x1b", "␛")  # an agent's text shall not command the reader's terminal
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _readable(value: object) -> object:
    """Bytes as the text that they are, else in hexadecimal and with their number; also inside lists and structs."""
    if isinstance(value, bytes):
        text = value[:_LONGEST].decode("utf-8", "replace")
        if text.isprintable() and "\ufffd" not in text[:-1]:
            return text
        return f"0x{value[:_BYTES].hex()}{'…' if len(value) > _BYTES else ''} ({len(value)} bytes)"
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    return value
