"""The live display of a run: one table on a terminal, one line per step elsewhere."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from stack.demo.facts import RunFacts

_WIDTH = 44
_SPARKS = "▁▂▃▄▅▆▇█"


class Display:
    """Shows what `facts` hold whenever `update` is called. Used as a context."""

    def __init__(self, facts: RunFacts, steps: int, console: Console) -> None:
        self._facts = facts
        self._steps = steps
        self._console = console
        self._printed = 0
        self._live = (
            Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        )

    def say(self, sentence: str) -> None:
        """Something that happened, above the table."""
        self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def update(self) -> None:
        """Show the newest facts."""
        if self._live is not None:
            self._live.update(self._table())
            return
        for step in sorted(self._facts.steps):
            if step > self._printed:
                self._printed = step
                self.say(line(self._facts, step, self._steps))

    def _table(self) -> Table:
        facts = self._facts
        curve = reward_curve(facts)
        table = Table.grid(padding=(0, 2))
        table.add_row(
            "step",
            ProgressBar(self._steps, len(facts.steps), width=_WIDTH),
            f"{len(facts.steps)}/{self._steps}",
        )
        table.add_row("reward", sparkline(curve), f"{curve[-1]:.3f}" if curve else "")
        table.add_row("groups", _groups(facts), "")
        table.add_row("versions", f"{facts.versions_alive} alive, {len(facts.published)} published", "")
        table.add_row("generations", f"{facts.preempted} cut, {facts.resumed} went on", "")
        table.add_row("speed", f"{facts.tokens_per_second:.0f} tokens/s", f"{facts.seconds:.0f} s")
        return table

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def line(facts: RunFacts, step: int, steps: int) -> str:
    """One step in words."""
    rewards = facts.rewards_of(step)
    metrics = facts.steps[step].metrics
    return (
        f"step {step}/{steps}  reward {fmean(rewards) if rewards else 0.0:.3f}  lag {metrics.get('lag_mean', 0.0):.2f}  "
        f"{facts.versions_alive} versions alive  {_groups(facts)}  {facts.preempted} cut  "
        f"{facts.tokens_per_second:.0f} tokens/s"
    )


def reward_curve(facts: RunFacts) -> list[float]:
    """Mean reward of the batch of every step."""
    return [fmean(rewards) for step in sorted(facts.steps) if (rewards := facts.rewards_of(step))]


def sparkline(values: list[float], width: int = _WIDTH) -> str:
    """A curve between 0 and 1 in one line, averaged down to the width."""
    count = min(width, len(values))
    bounds = [i * len(values) // count for i in range(count + 1)] if count else []
    means = [fmean(values[start:stop]) for start, stop in pairwise(bounds)]
    return "".join(_SPARKS[round(min(1.0, max(0.0, mean)) * (len(_SPARKS) - 1))] for mean in means)


def _groups(facts: RunFacts) -> str:
    kept, dropped, retried = (facts.outcome(kind) for kind in ("kept", "dropped", "retry"))
    return f"{kept} kept, {dropped} dropped, {retried} retried ({facts.stale} stale)"
