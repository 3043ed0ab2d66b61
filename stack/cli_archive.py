"""The commands that read a run's archive: sql, report, replay, whatif."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from schemas.errors import ConfigError
from stack.run_directory import find_run

_FILE_WIDTH = 160
Run = Annotated[str, typer.Argument(help="Run directory, or the id of a run under ./runs.")]


def sql(
    run: Annotated[
        str | None, typer.Argument(help="Run directory, or the id of a run under ./runs; --named needs none.")
    ] = None,
    query: Annotated[
        str | None, typer.Argument(help="SQL, or the name of a query; without: a small shell")
    ] = None,
    named: Annotated[bool, typer.Option("--named", help="List the named queries")] = False,
) -> None:
    """Ask a run's archive with SQL."""
    from analytics.catalog import query_names
    from analytics.sql import rich_table, run_query, sql_shell

    if named:
        typer.echo("\n".join(query_names()))
    elif run is None:
        raise ConfigError("sql wants a RUN: a run directory, or the id of a run under ./runs")
    elif query is None:
        sql_shell(find_run(run))
    else:
        _console().print(rich_table(run_query(find_run(run), query)))


def report(run: Run) -> None:
    """Print the report of a run, and write it as HTML and JSON into the run's directory."""
    from analytics.report import write_report

    write_report(find_run(run), Console())


def whatif(
    run: Run,
    keep_versions: Annotated[str, typer.Option(help="Windows to compare, as 1,2,4 (0: off)")] = "0,1,2,4",
) -> None:
    """Fold the archived control log again under other settings, and compare the fates of the groups."""
    from analytics.sql import rich_table
    from analytics.whatif import whatif as fold_again

    try:
        windows = [int(text) for text in keep_versions.split(",")]
    except ValueError:
        raise ConfigError(f"--keep-versions wants numbers with commas, not {keep_versions!r}") from None
    _console().print(rich_table(fold_again(find_run(run), {"window.keep_versions": windows})))


def replay(
    run: Run,
    verify: Annotated[
        bool, typer.Option("--verify", help="Fold the control log again; compare byte for byte")
    ] = False,
    to: Annotated[
        str | None, typer.Option(metavar="RUN2", help="Put the events back under this run id")
    ] = None,
    bootstrap_servers: Annotated[str, typer.Option(help="For --to: this broker instead of an own one")] = "",
) -> None:
    """Prove that the log is the truth. Exit status 1: what came out is not what was recorded."""
    directory = find_run(run)
    if verify == (to is not None):
        raise ConfigError("replay wants either --verify or --to RUN2")
    ok = _verify(directory) if to is None else _replay_to(directory, to, bootstrap_servers)
    raise typer.Exit(0 if ok else 1)


def _verify(directory: Path) -> bool:
    from analytics.replay import verify

    report = verify(directory)
    for topic in (report.verdicts, report.batches):
        typer.echo(
            f"{topic.topic}: {topic.equal} of {topic.recorded} recorded effects come out of the fold byte for byte"
        )
        if topic.difference is not None:
            typer.echo(f"  first difference at {topic.difference.index}", err=True)
            typer.echo(
                f"    recorded {topic.difference.recorded}\n    folded   {topic.difference.folded}", err=True
            )
    return report.ok


def _replay_to(directory: Path, new_run_id: str, bootstrap_servers: str) -> bool:
    from stack.replaying import replay_to

    report, comparison = asyncio.run(replay_to(directory, new_run_id, typer.echo, bootstrap_servers))
    typer.echo(
        f"{report.session_events} session events and {report.control_events} control events went back into the log"
    )
    typer.echo(
        f"{comparison.groups} groups, {comparison.sequences} sequences and {comparison.tokens} tokens were assembled again: "
        f"{len(comparison.different)} differ, {len(comparison.missing)} are missing, {len(comparison.extra)} are new"
    )
    for group, attempt, columns in comparison.different[:10]:
        typer.echo(f"  {group} attempt {attempt} differs in {columns}", err=True)
    typer.echo(f"{len(comparison.verdict_changes)} of {comparison.verdicts} verdicts changed with the timing")
    for change in comparison.verdict_changes[:10]:
        typer.echo(f"  {change.group} attempt {change.attempt}: {change.before} became {change.after}")
    return comparison.ok and report.ended


def _console() -> Console:
    """Tables keep their shape in a file or a pipe, which have no width of their own."""
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    for command in (sql, report, replay, whatif):
        app.command()(command)
