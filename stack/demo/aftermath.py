"""When a demo's run is over: report, laws, effects, replay; each from the archive alone. Names what failed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from analytics.archived_log import archived_events
from analytics.catalog import connect
from analytics.invariants import check_run
from analytics.replay import verify
from analytics.report import write_report
from schemas.settings import Settings
from stack.demo.checks import Check, effects
from stack.demo.facts import RunFacts
from stack.demo.presets import Demo
from stack.demo.replies import replies, side_by_side


def aftermath(settings: Settings, demo: Demo, console: Console) -> int:
    """Exit status: 0 when everything held, else 1."""
    directory = settings.run_directory
    facts = archived_facts(directory, settings.run.run_id)
    write_report(directory, console)
    if demo.shows_replies:
        console.print(side_by_side(replies(directory)))
    full = settings.trainer.steps >= demo.steps
    cuts = settings.proxy.update_strategy == "abort"
    return verdict_of([*laws(directory), *effects(demo, facts, full=full, cuts=cuts)], console)


def archived_facts(directory: Path, run_id: str) -> RunFacts:
    """The run's facts from its archive."""
    facts = RunFacts(run_id)
    connection = connect(directory)
    try:
        for table in ("control", "verdicts", "batches"):
            for record in archived_events(connection, table, run_id):
                facts.fold(record.offset, record.event)
    finally:
        connection.close()
    return facts


def laws(directory: Path) -> list[Check]:
    """The design's invariants over the whole archive, and the replay of its control log."""
    found = [Check(law.name, law.ok, law.detail) for law in check_run(directory)]
    replayed = verify(directory)
    said = f"{replayed.verdicts.equal} verdicts and {replayed.batches.equal} batches byte for byte"
    return [*found, Check("replay_verify", replayed.ok, said)]


def verdict_of(checks: Iterable[Check], console: Console) -> int:
    """Print every check; 0 when all held."""
    failed = []
    for check in checks:
        said = f"{'ok    ' if check.ok else 'FAILED'} {check.name}: {check.said}"
        console.print(said, markup=False, highlight=False, soft_wrap=True)
        failed += [] if check.ok else [check.name]
    if failed:
        console.print(f"failed checks: {', '.join(failed)}", style="bold red", highlight=False)
    return 1 if failed else 0
