"""The processes by name: `hoofprint part NAME` imports one module and runs its `main(settings)`, nothing else."""

from __future__ import annotations

import importlib

from schemas.errors import ConfigError
from schemas.settings import Settings

MODULES: dict[str, str] = {
    "proxy": "proxy.server",
    "assembler": "streams.assembler_app",
    "controller": "streams.controller_app",
    "feeder": "streams.feeder",
    "trainer": "trainer.process",
    "archiver": "analytics.archiver",
    "rollout": "rollout.worker",
}


def run_part(name: str, settings: Settings) -> int:
    """Exit status of the process. ConfigError: no such part."""
    if name not in MODULES:
        raise ConfigError(f"there is no part {name}; parts are {', '.join(MODULES)}", name=name)
    module = importlib.import_module(MODULES[name])
    status: int | None = module.main(settings)
    return status or 0
