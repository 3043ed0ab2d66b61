"""The weights a run begins with: `engine.model`, or the untrained Dial policy of the run's seed.

The Dial policy is written once per run directory by a child process (`python -m stack.checkpoints DIRECTORY SEED`): torch
would otherwise stay in the memory of whoever supervises the run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from schemas.errors import ConfigError, StoreError
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
    """The checkpoint directory, absolute; the Dial policy is made where it is not there yet."""
    if settings.engine.model:
        check_model(settings)
        return Path(settings.engine.model).absolute()
    target = run_directory / INITIAL
    if not target.is_dir():
        command = [sys.executable, "-m", "stack.checkpoints", str(target), str(settings.run.seed)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise StoreError(
                f"the initial checkpoint could not be written: {done.stderr.strip()[-500:]}", path=str(target)
            )
    return target


def main(directory: str, seed: str) -> None:
    """Write the untrained Dial policy, whole or not at all."""
    from stack.models.dial import write_dial_checkpoint

    target = Path(directory)
    scratch = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        write_dial_checkpoint(scratch, int(seed))
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
