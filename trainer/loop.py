"""The trainer's one loop: it makes versions out of batches, and can be killed anywhere (design §5, "Trainer
step").

Order of a step: train, feedback, durable checkpoint, `StepCompleted`, export, `PolicyPublished`, engines,
`BatchRequested` of the next. Each of these either is in the log (or on disk) after a restart, or is done
again with the same ids; `_settle` does whatever is missing between the newest completed step and the next
request. So the start, the restart and the ordinary step share one path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import structlog

from journal.clock import Clock
from schemas import ids
from schemas.errors import ConfigError, InvariantBroken
from schemas.events import BatchRequested, Event, RolledBack, StepCompleted, TrainBatch, identified
from schemas.settings import Settings
from trainer.backends.contract import Backend
from trainer.batches import BatchReader
from trainer.checkpoints import CheckpointShelf
from trainer.control_view import ControlView
from trainer.feedback import StepIdentity
from trainer.publication import Publication
from trainer.recovery import plan_recovery
from trainer.step import StepOutcome, StepRunner

LOG = structlog.get_logger()


class Producer(Protocol):
    """What the trainer needs of `journal.producer.AckProducer`."""

    def send(self, event: Event) -> object: ...
    def publish(self, event: Event) -> object: ...
    def flush(self) -> None: ...


class Trainer:
    """Owns the weights of one policy.

    `follow` gives the log's new events, soon or none.
    """

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        producer: Producer,
        reader: BatchReader,
        publication: Publication,
        follow: Callable[[], list[Event]],
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._run_id = settings.run.run_id
        self._backend = backend
        self._producer = producer
        self._reader = reader
        self._publication = publication
        self._follow = follow
        self._clock = clock
        self._runner = StepRunner(backend, settings.trainer)
        self._shelf = CheckpointShelf(
            settings.run_directory / "checkpoints", settings.trainer.keep_checkpoints
        )
        self._checkpoint_step = 0
        self.view = ControlView(self._run_id)

    def run(self) -> None:
        """Recover, then train until the last step, `EndOfBatches` or `RunEnded`.

        The log must have been read.
        """
        self.recover()
        while True:
            step = self._settle()
            if step >= self._settings.trainer.steps or self.view.run_ended:
                break
            batch = self._await_batch(step + 1)
            if batch is None:
                break
            self._train(batch)
        LOG.info("training ended", step=self.view.last_step, version=self.view.label(self.view.last_step))

    def recover(self) -> None:
        """Bring the weights to the newest step of the log's surviving history."""
        initial = self._backend.digest()
        self._check_initial(initial)
        digests = {step: done.digest for step, done in self.view.completed.items()}
        plan = plan_recovery(digests, initial, self.view.branch, self._shelf.facts())
        if plan.checkpoint is not None:
            self._backend.load(plan.checkpoint.path)
            self._checkpoint_step = plan.checkpoint.step
            LOG.info("checkpoint loaded", step=plan.checkpoint.step, announced=not plan.announce)
            if plan.announce:
                self._publish(self._shelf.completed(plan.checkpoint))
        for step in plan.again:
            self._train_again(step)

    def _check_initial(self, digest: str) -> None:
        """The initial weights must be those that the run began with: all recorded steps stand on them."""
        first = self.view.published.get(self.view.label(0))
        if first is not None and first.digest not in (None, digest):
            raise ConfigError(
                "engine.model is not the checkpoint that this run began with",
                expected=first.digest,
                found=digest,
            )

    def _train_again(self, step: int) -> None:
        """A recorded step from its recorded batch.

        The digest must be the recorded one, else a new branch begins.
        """
        recorded = self.view.completed.get(step)
        batch = self.view.batches.get(step)
        if batch is None:
            raise InvariantBroken("a completed step has no recorded batch", step=step)
        if recorded is None:
            self._train(batch)  # behind a rollback: the step is new on its branch
            self._settle()
            return
        parent = self._backend.digest()
        outcome = self._step(batch)
        digest = self._backend.digest()
        LOG.info("step trained again", step=step, equal=digest == recorded.digest)
        if digest == recorded.digest:
            return
        branch = f"b{self.view.rollbacks + 1}"
        reason = f"step {step} gave {digest[:12]}, the log has {recorded.digest[:12]}"
        self._publish(
            RolledBack(
                run_id=self._run_id,
                occurred_at=self._clock(),
                to_step=step - 1,
                branch=branch,
                reason=reason,
            )
        )
        self._complete(batch, outcome, parent)
        self._settle()

    def _settle(self) -> int:
        """Publish the newest completed weights and request the next batch, as far as the log lacks it.

        The step.
        """
        step = self.view.last_step
        label = self.view.label(step)
        if label not in self.view.published:
            branch = self.view.completed[step].branch if step else ""
            self._publication.announce(self._run_id, label, step, branch, self._backend.digest())
            self._read_until(lambda: label in self.view.published)
        if label not in self.view.activated:
            self._publication.offer(label, step)
        self._prune(step)
        following = step + 1
        wanted = following <= self._settings.trainer.steps and not self.view.end_of_batches
        if wanted and self.view.needs_request(following):
            self._publish(
                BatchRequested(
                    run_id=self._run_id,
                    occurred_at=self._clock(),
                    step=following,
                    batch_id=ids.batch_id(self._run_id, following, self.view.branch),
                    branch=self.view.branch,
                )
            )
        return step

    def _await_batch(self, step: int) -> TrainBatch | None:
        """The batch of the step; None when there will be none."""
        while step not in self.view.batches:
            if self.view.end_of_batches or self.view.run_ended:
                return None
            self._read()
        return self.view.batches[step]

    def _train(self, batch: TrainBatch) -> None:
        parent = self._backend.digest()
        self._complete(batch, self._step(batch), parent)

    def _step(self, batch: TrainBatch) -> StepOutcome:
        """Update the weights from the batch; nothing is published."""
        version = self.view.label(batch.step - 1)
        ordinal = self.view.ordinal(version)
        data = self._reader.read(batch, self.view.ordinals)
        return self._runner.run(batch, data, StepIdentity(batch, version, ordinal, self._clock()))

    def _complete(self, batch: TrainBatch, outcome: StepOutcome, parent_digest: str) -> None:
        """Feedback, durable checkpoint, `StepCompleted`, in this order."""
        for event in outcome.feedback:
            self._producer.send(event)
        self._producer.flush()
        settings = self._settings.trainer
        durable = batch.step % settings.checkpoint_every == 0 or batch.step == settings.steps
        completed = identified(
            StepCompleted(
                run_id=self._run_id,
                occurred_at=self._clock(),
                step=batch.step,
                branch=self.view.branch,
                batch_id=batch.batch_id,
                digest=self._backend.digest(),
                checkpoint_step=batch.step if durable else self._checkpoint_step,
                metrics=outcome.metrics,
                drift=outcome.drift,
            )
        )
        if durable:
            self._shelf.save(self._backend, completed, parent_digest)
            self._checkpoint_step = batch.step
        self._publish(completed)
        LOG.info("step completed", step=batch.step, reward=outcome.metrics.get("reward_mean"))

    def _prune(self, step: int) -> None:
        """Keep the newest exports and those that an engine generates with."""
        newest = [self.view.label(s) for s in range(max(0, step + 1 - self._keep), step + 1)]
        self._publication.prune({*newest, *self.view.active.values()})

    @property
    def _keep(self) -> int:
        return self._settings.trainer.keep_checkpoints

    def _publish(self, event: Event) -> None:
        """Put an event into the log, and into the view as the log will give it back."""
        known = identified(event)
        self._producer.publish(known)
        self.view.apply(known)

    def _read(self) -> None:
        for event in self._follow():
            self.view.apply(event)

    def _read_until(self, condition: Callable[[], bool]) -> None:
        """Ordinals are ranks in the log, so a publication counts when it comes back from there."""
        while not condition():
            self._read()
