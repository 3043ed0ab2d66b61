"""The loop around admission without processes: fold, admission, workers and a trainer, in an order that the test draws.

Every action is one that a real process might take next. `publishes` and `activates` are apart, because engines generate with
the old version between the two.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from control_log import RUN, completed, configured, failed, requested
from control_log import published as published_event

from schemas import events as ev
from schemas.events import Event, identified
from schemas.ids import group_id
from schemas.settings import Settings
from streams.admission import AdmissionState, PromptOrder
from streams.admission_bounds import Limits, free_places
from streams.control_fold import fold
from streams.control_state import ControlState

SECOND = 1_000_000


class World:
    """`fails(prompt, attempt)`: that attempt fails. `flat(prompt)`: its rewards are all equal."""

    def __init__(self, seed: int, prompts: int, **sets: Any) -> None:
        configuration = configured(**sets)
        settings = Settings.from_json(configuration.settings)
        self.rng = random.Random(seed)
        self.now = 0
        self.control, self.admission = ControlState(RUN), AdmissionState(RUN)
        self.limits = Limits.of(settings)
        order = PromptOrder(prompts, settings.feeder.epochs, shuffle=False, seed=0)
        self._prompts = order.remaining(self.admission)
        self._of_group: dict[str, int] = {}
        self._offset = 0
        self.effects: list[ev.Effect] = []
        self.log: list[Event] = []
        self.fails: Callable[[int, int], bool] = lambda _prompt, _attempt: False
        self.flat: Callable[[int], bool] = lambda _prompt: False
        self.most_open = 0
        self._published, self._active = 0, 0
        self._batch: ev.TrainBatch | None = None
        self._step = 0
        for event in (configuration, published_event("v0"), self._activated(0), requested(1)):
            self.write(event)

    def _activated(self, version: int) -> Event:
        return identified(
            ev.PolicyActivated(run_id=RUN, occurred_at=self.now, version=f"v{version}", engine_id="e")
        )

    def write(self, event: Event) -> None:
        """Into `control.v1`, and what it causes into the other topics; the feeder reads all of it."""
        self.log.append(event)
        self.admission.fold(event)
        caused = fold(self.control, self._offset, event)
        self._offset += 1
        for effect in caused:
            self.effects.append(effect)
            self.admission.fold(effect)
            if isinstance(effect, ev.TrainBatch):
                self._batch = effect

    def admit(self) -> None:
        """What the feeder does in one step."""
        for retry in self.admission.next_retries():
            assert retry.group_id is not None
            self._admitted(
                retry.group_id, retry.attempt, retry.prompt.dataset_epoch, retry.prompt.prompt_index
            )
        if self.admission.dataset_ended:
            return
        for _ in range(free_places(self.admission, self.limits, self.now)):
            prompt = next(self._prompts, None)
            if prompt is None:
                self.write(identified(ev.DatasetEnded(run_id=RUN, occurred_at=self.now, groups=0)))
                return
            name = group_id(RUN, prompt.dataset_epoch, prompt.prompt_index)
            self._of_group[name] = prompt.prompt_index
            self._admitted(name, 0, prompt.dataset_epoch, prompt.prompt_index)

    def _admitted(self, group: str, attempt: int, epoch: int, index: int) -> None:
        self.write(
            identified(
                ev.GroupAdmitted(
                    run_id=RUN, occurred_at=self.now, group_id=group, attempt=attempt, group_size=2, prompt_index=index,
                    dataset_epoch=epoch, prompt_digest="d",
                )
            )
        )  # fmt: skip
        self.most_open = max(self.most_open, self.control.open_groups)

    def running(self) -> list[str]:
        """Groups that workers have in hand."""
        return list(self.control.running)

    def finish(self, group: str) -> None:
        """A worker is done with an attempt; its tokens are of any version since its admission."""
        attempt, prompt = self.control.running[group], self._of_group[group]
        if self.fails(prompt, attempt):
            self.write(failed(group, attempt))
            return
        oldest = self.admission.open_groups[group].ordinal
        versions = [f"v{self.rng.randint(oldest, self._active)}" for _ in range(2)]
        rewards = [1.0, 1.0] if self.flat(prompt) else [0.0, 1.0]
        self.write(completed(group, versions, attempt, rewards=rewards, at=self.now))

    @property
    def training(self) -> bool:
        return self._batch is not None

    def train(self) -> None:
        """The step is done and its version is out; engines change later."""
        assert self._batch is not None
        self._step, self._batch = self._batch.step, None
        self._published = self._step
        self.write(
            identified(
                ev.PolicyPublished(
                    run_id=RUN, occurred_at=self.now, version=f"v{self._step}", step=self._step
                )
            )
        )

    @property
    def behind(self) -> bool:
        return self._active < self._published

    def activate(self) -> None:
        self._active = self._published
        self.write(self._activated(self._active))
        self.write(
            identified(
                ev.BatchRequested(
                    run_id=RUN, occurred_at=self.now, step=self._step + 1, batch_id=requested(self._step + 1).batch_id
                )
            )
        )  # fmt: skip

    def run(self, most_actions: int = 5000) -> None:
        """Actions in random order until the end of batches."""
        if not self.act(most_actions):
            raise AssertionError(f"the run stands still: {self.control.open_groups} groups open")

    def act(self, actions: int) -> bool:
        """So many actions in random order; whether the batches have ended."""
        slow = {}
        for _ in range(actions):
            if self.control.end_reason is not None:
                return True
            self.now += SECOND
            choices: list[Callable[[], None]] = [self.admit]
            for group in self.running():
                # some groups are much slower than others
                weight = slow.setdefault(group, self.rng.choice([1, 1, 1, 8]))
                if self.rng.randrange(weight) == 0:
                    choices.append(lambda group=group: self.finish(group))  # type: ignore[misc]
            if self.training:
                choices.append(self.train)
            if self.behind:
                choices.append(self.activate)
            self.rng.choice(choices)()
        return False

    def verdicts(self) -> list[ev.Verdict]:
        return [effect for effect in self.effects if isinstance(effect, ev.Verdict)]
