"""`hoofprint replay RUN --to RUN2`: live assembler and controller judge an archived run again, under a new run id.

A broker of its own (or the configured one), assembler, controller and archiver run for the time of the replay; nothing
generates and nothing trains. The sequences must come out equal; verdicts may differ with timing and are reported.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from analytics.archiver import archive_until
from analytics.replay import Comparison, ReplayReport, compare, replay_into, replay_settings
from schemas.errors import ConfigError
from schemas.settings import Settings
from stack.plan import REPLAY
from stack.supervisor import Say
from stack.up import running


async def replay_to(
    run_directory: Path, new_run_id: str, say: Say, bootstrap_servers: str = ""
) -> tuple[ReplayReport, Comparison]:
    """Replay and compare. ConfigError: the id is taken. ArchiveError: nobody answered."""
    settings = await asyncio.to_thread(replay_settings, run_directory, new_run_id)
    if settings.run_directory.exists():
        raise ConfigError(f"there is a run {new_run_id} already", run_id=new_run_id)
    tree = settings.model_dump()
    tree["kafka"]["bootstrap_servers"] = bootstrap_servers
    async with running(Settings.model_validate(tree), say, roles=REPLAY) as stack:
        report = await asyncio.to_thread(replay_into, run_directory, stack.settings)
        await asyncio.to_thread(archive_until, stack.settings)
        target = stack.directory
    return report, await asyncio.to_thread(compare, run_directory, target)
