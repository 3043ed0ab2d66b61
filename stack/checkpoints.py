"""The weights a run begins with: `engine.model`, or the untrained Dial policy of the run's seed.

The Dial policy is written once per run directory by a child process (`python -m stack.checkpoints DIRECTORY SEED`): torch
would otherwise stay in the memory of whoever supervises the run.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from schemas.errors import ConfigError
from schemas.settings import Settings

INITIAL = "initial"


def check_model(settings: Settings) -> None:
    """ConfigError when `engine.model` names no directory; asked before anything is written."""
    if settings.engine.model and not Path(settings.engine.model).is_dir():
        raise ConfigError(
            f"engine.model: there is no checkpoint directory {settings.engine.model}",
            key="engine.model",
            model=settings.engine.model,
        )


def initial_checkpoint(settings: Settings, run_directory: Path) -> Path:
    """Where the checkpoint is, absolute; the Dial policy may still have to be made (`maker`)."""
    return Path(settings.engine.model).absolute() if settings.engine.model else run_directory / INITIAL


def maker(checkpoint: Path, seed: int) -> tuple[str, ...]:
    """Command line that writes the untrained Dial policy."""
    return (sys.executable, "-m", "stack.checkpoints", str(checkpoint), str(seed))


def main(directory: str, seed: str) -> None:
    """Write the untrained Dial policy, whole or not at all."""
    from stack.models.dial import write_dial_checkpoint

    target = Path(directory)
    if target.is_dir():
        return
    scratch = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        write_dial_checkpoint(scratch, int(seed))
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
