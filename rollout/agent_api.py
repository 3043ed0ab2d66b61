"""What an agent is: an async function that plays one trajectory, `agent(task) -> Finish`.

The worker opens the session, runs the agent and finalizes with what it returned. An agent that raises has a failed
trajectory (`agent_error`); it never ends the worker.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schemas.errors import ConfigError
from schemas.events import TrajectoryStatus

if TYPE_CHECKING:
    from rollout.client import Session
    from schemas.settings import Settings


@dataclass(frozen=True, slots=True)
class Task:
    """One trajectory to play. `prompt`: the dataset's record. `seed` differs for every sample of every attempt."""

    prompt: Mapping[str, Any]
    sample_index: int
    seed: int
    session: Session


@dataclass(frozen=True, slots=True)
class Finish:
    """How it ended. `reward` None: somebody else assigns it later. `components`: what the reward consists of."""

    reward: float | None
    status: TrajectoryStatus = "completed"
    reason: str = "done"
    components: Mapping[str, float] = field(default_factory=dict)


Agent = Callable[[Task], Awaitable[Finish]]
Dataset = Callable[["Settings"], Sequence[Mapping[str, Any]]]


def load_agent(name: str) -> Agent:
    """The agent named `module:function`. ConfigError when there is none."""
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ConfigError(f"an agent is named module:function, not {name!r}", agent=name)
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as missing:
        raise ConfigError(f"there is no agent {name}: {missing}", agent=name) from missing
    if not callable(found):
        raise ConfigError(f"{name} is not a function", agent=name)
    agent: Agent = found
    return agent
