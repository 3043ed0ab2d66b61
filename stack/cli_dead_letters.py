"""`hoofprint dead-letters list | requeue`: records that could not be used, at the broker of a run that is up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from schemas.settings import Settings
from stack.run_directory import find_run, read_settings

if TYPE_CHECKING:
    from journal.dead_letters import Buried, Kept
    from schemas.topics import Topic as LogTopic

_PATIENCE_S = 5.0

Run = Annotated[str, typer.Argument(help="Run directory, or the id of a run under ./runs; it must be up.")]
Topic = Annotated[str | None, typer.Option(help="Only of this topic, e.g. rollout.segments.v1")]
Partition = Annotated[int | None, typer.Option(min=0, help="Only of this partition")]
Offset = Annotated[int | None, typer.Option(min=0, help="Only the record that stood there")]

commands = typer.Typer(no_args_is_help=True, help="Records that could not be used, kept as they were.")


@commands.command("list")
def show(run: Run, topic: Topic = None, partition: Partition = None, offset: Offset = None) -> None:
    """List a run's dead letters: where each came from, why, how large, and whether it was put back."""
    from journal.dead_letters import chosen

    found = chosen(_of(_settings(run)), topic=topic, partition=partition, offset=offset, again=True)
    Console().print(table(found))


@commands.command()
def requeue(
    run: Run,
    topic: Topic = None,
    partition: Partition = None,
    offset: Offset = None,
    again: Annotated[bool, typer.Option("--again", help="Also those that were put back already")] = False,
) -> None:
    """Put dead letters back where they came from, with their key and their bytes; all that were not put back yet."""
    from journal.dead_letters import chosen
    from journal.dead_letters import requeue as put_back

    settings = _settings(run)
    selected = chosen(_of(settings), topic=topic, partition=partition, offset=offset, again=again)
    done, refused = put_back(settings.kafka, selected, _archived(settings))
    for one in done:
        letter = one.letter
        typer.echo(
            f"{letter.topic}/{letter.partition}/{letter.offset} is now at {one.partition}/{one.offset}"
        )
    typer.echo(f"{len(done)} put back")
    for cannot in refused:
        typer.echo(f"not put back: {cannot.message}", err=True)
    if refused:
        raise typer.Exit(1)


def table(found: list[Buried]) -> Table:
    """One row per letter."""
    from schemas.letters import was_cut

    shown = Table("topic", "partition", "offset", "reason", "bytes", "put back")
    for one in found:
        letter = one.letter
        size = f"{len(letter.raw)}{' (cut)' if was_cut(letter) else ''}"
        place = (letter.topic, str(letter.partition), str(letter.offset))
        shown.add_row(*place, letter.reason, size, "yes" if one.requeued else "")
    return shown


def _settings(run: str) -> Settings:
    from journal.topic_admin import wait_for_broker

    settings = read_settings(find_run(run))
    wait_for_broker(settings.kafka, _PATIENCE_S)
    return settings


def _archived(settings: Settings) -> Kept:
    """Records that the log has no longer, from the run's archive."""

    def kept(topic: LogTopic, partition: int, offset: int) -> tuple[bytes | None, bytes] | None:
        from analytics.archived_log import archived_record

        return archived_record(settings.run_directory, topic, partition, offset)

    return kept


def _of(settings: Settings) -> list[Buried]:
    from journal.dead_letters import dead_letters

    return dead_letters(settings.kafka, settings.run.run_id)


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.add_typer(commands, name="dead-letters")
