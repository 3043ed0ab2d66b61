"""The demos as settings, with what each must reach. Rates and curves were measured beforehand in one synchronous process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError
from stack.models.smollm2 import ensure_smollm2


def reward(value: float) -> float:
    """The reward itself."""
    return value


def right(value: float) -> float:
    """1 for every reward that is not zero: the share of right replies."""
    return float(value > 0)


@dataclass(frozen=True, slots=True)
class Goal:
    """`measure` maps a trajectory's reward. Its mean over the last `last` steps is to be at least `level`, and at least
    `rise` above its mean over the first `first` steps."""

    measure: Callable[[float], float]
    last: int
    level: float
    first: int
    rise: float


@dataclass(frozen=True, slots=True)
class Demo:
    """One demo. `model` None: the untrained Dial policy of the seed. `shows_staleness`: its effects are required of the run.
    `shows_replies`: print first and last texts. `stall_s`: a run without a step for so long is broken."""

    name: str
    settings: Mapping[str, Mapping[str, Any]]
    goal: Goal
    stall_s: float
    model: Callable[[], Path] | None = None
    shows_staleness: bool = False
    shows_replies: bool = False

    @property
    def steps(self) -> int:
        """Steps after which the goal is to be reached."""
        return int(self.settings["trainer"]["steps"])

    def base(self, run_id: str, steps: int | None) -> dict[str, Any]:
        """Settings below the user's own."""
        tree: dict[str, Any] = {section: dict(values) for section, values in self.settings.items()}
        tree["run"] = {"run_id": run_id}
        if steps is not None:
            tree["trainer"]["steps"] = steps
        if self.model is not None:
            tree["engine"]["model"] = str(self.model())
        return tree


DIAL = Demo(
    name="dial",
    settings={
        "kafka": {"partitions": 2},
        "window": {"keep_versions": 2},
        "group": {"size": 8},
        "batch": {"size": 8},
        "feeder": {"dataset": "rollout.tasks.dial:dataset", "epochs": 0, "max_outstanding_groups": 24},
        "rollout": {"agent": "rollout.tasks.dial:agent", "concurrent_groups": 14},
        "engine": {"max_running": 128},
        "archive": {"flush_s": 10.0},
        "trainer": {
            "loss": "ppo",
            "ratio": "rollout",
            "entropy_bonus": 0.04,
            "learning_rate": 4e-3,
            "betas": (0.9, 0.98),
            "warmup_steps": 5,
            "grad_clip": 1.0,
            "aggregation": "seq_mean_token_mean",
            "steps": 100,
        },
    },
    goal=Goal(reward, last=10, level=0.75, first=10, rise=0.5),
    shows_staleness=True,
    stall_s=120.0,
)

SMOLLM2 = Demo(
    name="smollm2",
    settings={
        "kafka": {"partitions": 2},
        "window": {"keep_versions": 2},
        "group": {"size": 8, "timeout_s": 600.0},
        "batch": {"size": 4},
        "feeder": {"dataset": "rollout.tasks.arithmetic:dataset", "epochs": 0, "max_outstanding_groups": 6},
        "rollout": {"agent": "rollout.tasks.arithmetic:agent", "concurrent_groups": 6},
        "proxy": {"quiesce_timeout_s": 30.0},
        "engine": {"max_running": 48, "context_length": 256},
        "archive": {"flush_s": 10.0},
        "trainer": {
            "loss": "ppo",
            "ratio": "rollout",
            "learning_rate": 2e-5,
            "betas": (0.9, 0.99),
            "grad_clip": 1.0,
            "max_tokens_per_microbatch": 768,
            "checkpoint_every": 6,
            "keep_checkpoints": 2,
            "publication_patience_s": 60.0,
            "steps": 12,
        },
    },
    goal=Goal(right, last=3, level=0.65, first=2, rise=0.3),
    stall_s=300.0,
    model=ensure_smollm2,
    shows_replies=True,
)


def _on_sglang(demo: Demo, goal: Goal, **changes: Mapping[str, Any]) -> Demo:
    """The same demo with SGLang as its engine: slower to start and to generate, so fewer steps and more patience."""
    tree = {section: {**values, **changes.get(section, {})} for section, values in demo.settings.items()}
    tree["engine"]["server"] = "sglang"
    tree["proxy"] = {**tree.get("proxy", {}), "quiesce_timeout_s": 30.0}
    tree["trainer"]["publication_patience_s"] = 180.0  # the engine may start for so long
    return replace(demo, name=f"{demo.name}-sglang", settings=tree, goal=goal, stall_s=3 * demo.stall_s)


DIAL_SGLANG = _on_sglang(
    DIAL,
    Goal(reward, last=5, level=0.2, first=5, rise=0.1),
    trainer={"steps": 30},
    group={"timeout_s": 600.0},
)
SMOLLM2_SGLANG = _on_sglang(SMOLLM2, SMOLLM2.goal)

DEMOS: Mapping[tuple[str, str], Demo] = {
    ("dial", "cpu"): DIAL,
    ("smollm2", "cpu"): SMOLLM2,
    ("dial", "sglang"): DIAL_SGLANG,
    ("smollm2", "sglang"): SMOLLM2_SGLANG,
}


def demo_named(task: str, engine: str) -> Demo:
    """ConfigError for an unknown name."""
    tasks, engines = (sorted({names[i] for names in DEMOS}) for i in (0, 1))
    if task not in tasks:
        raise ConfigError(f"there is no demo {task}; demos are {', '.join(tasks)}", task=task)
    if engine not in engines:
        raise ConfigError(f"there is no engine {engine}; engines are {', '.join(engines)}", engine=engine)
    return DEMOS[task, engine]
