"""The loop: one thread that admits, prefills, decodes, and obeys pause, abort and weight changes between
steps.

Everything here but `submit` and `call` runs in that thread, so a command sees no step half done.
Submissions do not wake a paced loop; commands do. Each iteration prefills what fits, then decodes one token
for every running row. Weight changes follow SGLang: paused, or with `abort_all`, at once; else after every
request that was already here, while later ones are held back. A pause in the meantime ends the wait.
`retract` sends running requests back to the queue's head: they are prefilled again, under the weights of
that moment, and go on; `in_place` keeps their cache as it is. Unlike SGLang, an abort reaches queued and
paused requests at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from stack.engine.batch import Batch
from stack.engine.generation import Generation, finish_abort, finish_stop
from stack.engine.model import CausalLM
from stack.engine.prefill import prefill, take_admissible
from stack.engine.prefixes import Prefixes

Result = TypeVar("Result")
PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """New weights (none: only a new label), ready to be put in place."""

    model: CausalLM | None
    model_path: str | None
    version: str | None
    flush_cache: bool
    abort_all: bool


@dataclass(frozen=True, slots=True)
class Load:
    """How much the engine has to do."""

    running: int
    waiting: int
    cached_positions: int
    steps: int


class Scheduler:
    """Owns the model, the batch and the queue."""

    def __init__(
        self,
        model: CausalLM,
        *,
        model_path: str,
        version: str,
        max_running: int,
        min_step_s: float,
        threads: int,
        prefix_cache_bytes: int,
        report: Callable[[list[Generation]], None],
        match_stop: Callable[[Generation], str | None],
    ) -> None:
        self.model_path = model_path
        self.version = version
        self._model = model
        self._weights_epoch = 0
        self._batch = Batch(model, max_running)
        self._prefixes = Prefixes(prefix_cache_bytes)
        self._min_step_s = min_step_s
        self._threads = threads
        self._report = report
        self._match_stop = match_stop
        self._waiting: list[Generation] = []
        self._held: list[Generation] = []
        self._paused: PauseMode | None = None
        self._pending: tuple[WeightUpdate, Future[bool]] | None = None
        self._steps = 0
        self._next_step_at = 0.0
        self._stopped = False
        self._wake = threading.Condition()
        self._hungry = False
        self._inbox: deque[Generation] = deque()
        self._commands: deque[Callable[[], None]] = deque()

    # -- called by other threads --------------------------------------------------------------------

    def submit(self, generation: Generation) -> None:
        """Queue a request; `report` will tell of its progress."""
        with self._wake:
            self._inbox.append(generation)
            if self._hungry:
                self._wake.notify()

    def call(self, command: Callable[[], Result]) -> Future[Result]:
        """Run a method of this class in the loop's thread, between two steps."""
        future: Future[Result] = _certain()
        self._enqueue(lambda: future.set_result(command()))
        return future

    def update(self, update: WeightUpdate) -> Future[bool]:
        """Change weights or label; the result says whether the cache could be flushed as asked."""
        future: Future[bool] = _certain()
        self._enqueue(lambda: self._begin_update(update, future))
        return future

    def _enqueue(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # -- the loop -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until `stop`; an exception here is a bug and must end the process (see `server`)."""
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while not self._stopped:
                for command in self._wait_for_work():
                    command()
                if self._seconds_until_step() == 0.0:
                    self._step()

    def _wait_for_work(self) -> list[Callable[[], None]]:
        with self._wake:
            while not self._commands:
                timeout = self._seconds_until_step()
                if timeout == 0.0:
                    break
                self._hungry = timeout is None
                self._wake.wait(timeout)
            self._hungry = False
            commands = list(self._commands)
            self._commands.clear()
            target = self._waiting if self._pending is None else self._held
            target.extend(self._inbox)
            self._inbox.clear()
            return commands

    def _seconds_until_step(self) -> float | None:
        """0: now; None: nothing to do until somebody calls."""
        work = self._batch.rows or self._waiting or (self._inbox and self._pending is None)
        if self._paused is not None or not work:
            return None
        return max(0.0, self._next_step_at - time.perf_counter())

    def _step(self) -> None:
        if self._min_step_s:
            self._next_step_at = time.perf_counter() + self._min_step_s
        news = self._admit()
        if self._batch.rows:
            self._batch.decode(self._model)
            news += self._collect(0)
        self._steps += 1
        if news:
            self._report(news)
        self._settle_update()

    def _admit(self) -> list[Generation]:
        admitted = take_admissible(self._waiting, self._batch.capacity - len(self._batch))
        if not admitted:
            return []
        del self._waiting[: len(admitted)]
        for generation in admitted:
            generation.enter_version(self.version)
            generation.weights_epoch = self._weights_epoch
        first = len(self._batch)
        prefill(self._model, self._batch, admitted, self._prefixes)
        return [g for g in self._collect(first) if g.finish_reason is not None]

    def _collect(self, first: int) -> list[Generation]:
        """Remove the rows from `first` on that have ended; return them and those that stream."""
        news: list[Generation] = []
        rows = self._batch.rows
        for row in range(len(rows) - 1, first - 1, -1):
            generation = rows[row]
            finish = generation.finish_reason
            if generation.sampling.stop and (finish is None or finish["type"] == "length"):
                matched = self._match_stop(generation)  # a stop string ends it before the length does
                if matched is not None:
                    generation.finish_reason = finish_stop(matched)
            if generation.finish_reason is not None:
                self._keep_prefix(generation, row)
                news.append(self._batch.remove(row))
            elif generation.tells():
                news.append(generation)
        return news

    def _keep_prefix(self, generation: Generation, row: int) -> None:
        """Store the row's keys and values for a next turn, if all of them are of the weights of now."""
        if self._prefixes.enabled and generation.weights_epoch == self._weights_epoch:
            length = int(self._batch.length[row])
            tokens = generation.tokens[:length]
            self._prefixes.keep(tokens, len(generation.prompt), self._batch.cache.read(row, length))

    # -- commands -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the loop after aborting what is left, so that no client waits for nothing."""
        self.abort(None)
        self._stopped = True

    def abort(self, rid: str | None) -> None:
        """End one request (exact id) or all; unknown ids are ignored."""
        ended: list[Generation] = []
        for row in range(len(self._batch) - 1, -1, -1):
            if rid in (None, self._batch.rows[row].rid):
                generation = self._batch.remove(row)
                generation.finish_reason = finish_abort("Aborted")
                ended.append(generation)
        for queue in (self._waiting, self._held):
            for generation in [g for g in queue if rid in (None, g.rid)]:
                queue.remove(generation)
                generation.finish_reason = finish_abort("Abort in waiting queue")
                ended.append(generation)
        if ended:
            self._report(ended)
        self._settle_update()

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping. New requests wait in every mode."""
        self._paused = mode
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            retracted = [self._batch.remove(row) for row in range(len(self._batch) - 1, -1, -1)]
            for generation in retracted:
                generation.retractions += 1
            retracted.sort(key=lambda g: g.arrived)
            self._waiting[:0] = retracted
        self._settle_update()

    def resume(self) -> None:
        """Step again."""
        self._paused = None

    def flush_cache(self) -> bool:
        """Forget cached prefixes; refused while requests run, or wait without a pause."""
        idle = not self._batch.rows and (self._paused is not None or not self._waiting)
        if idle:
            self._prefixes.clear()
        return idle

    def load(self) -> Load:
        """Counts for routing and for tests that wait for a state."""
        cached = int(self._batch.length[: len(self._batch)].sum())
        return Load(len(self._batch), len(self._waiting) + len(self._held), cached, self._steps)

    def _begin_update(self, update: WeightUpdate, future: Future[bool]) -> None:
        if update.abort_all:
            self.abort(None)
        if self._paused is None and (self._batch.rows or self._waiting) and update.model is not None:
            self._pending = (update, future)
        else:
            future.set_result(self._apply(update))

    def _settle_update(self) -> None:
        """Apply the pending update once nothing older is left, or the engine is paused."""
        if self._pending is None or (self._paused is None and (self._batch.rows or self._waiting)):
            return
        update, future = self._pending
        self._pending = None
        future.set_result(self._apply(update))
        self._waiting += self._held
        self._held = []

    def _apply(self, update: WeightUpdate) -> bool:
        if update.model is not None:
            self._model = update.model
            self._weights_epoch += 1
            self._prefixes.clear()  # also with flush_cache=false: old weights' keys are never reused by new requests
            self.model_path = update.model_path or self.model_path
        if update.version is not None:
            self.version = update.version
            for generation in self._batch.rows:
                generation.enter_version(update.version)
        return not (update.flush_cache and self._batch.rows)


def _certain() -> Future[Any]:
    """A future that its waiter cannot cancel: a client that leaves must not fail the command."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
