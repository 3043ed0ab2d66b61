"""The rollout worker process: pulls group attempts, plays them concurrently, stops those that were decided.

Invariants: a prompt's offset is committed only when its attempt needs no more work; an attempt that the log says is
closed is not played again; a broken agent ends its trajectory, never the worker; a lost connection to Kafka ends the
worker with a non-zero status, and its successor plays the unfinished attempts again from scratch.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import structlog
from confluent_kafka import Message

from journal.event_log import EventFollower
from journal.log_setup import configure_logging
from journal.payloads import PayloadStore
from journal.producer import AckProducer
from rollout.agent_api import load_agent
from rollout.answers import AnswerLog
from rollout.attempts import Attempt, ClosedAttempts
from rollout.client import ProxyClient
from rollout.group_run import GroupAttempt, GroupPlayer
from rollout.persistence import AttemptClosed
from rollout.prompts import Listener, Place, PromptSource
from schemas.errors import HoofprintError, IncompatibleEvent, InvariantBroken, SchemaError, TransportError
from schemas.events import Event, GroupRequested
from schemas.letters import letter_of
from schemas.settings import Settings
from schemas.topics import CONTROL, PROMPTS, VERDICTS

log = structlog.get_logger(__name__)

_FOLLOW_S = 0.2


class Worker:
    """One process's worth of rollout; `run` ends when `stop` is called or Kafka is lost for good."""

    def __init__(self, settings: Settings, player: GroupPlayer) -> None:
        self._settings = settings
        self._player = player
        self._loop = asyncio.get_running_loop()
        self._closed = ClosedAttempts(settings.run.run_id)
        self._running: dict[Attempt, tuple[Place, asyncio.Task[None]]] = {}
        self._cancelled: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(settings.rollout.concurrent_groups)
        self._payloads = PayloadStore(settings.payload_url)
        self._stop = asyncio.Event()
        self._failure: HoofprintError | None = None
        soon = self._loop.call_soon_threadsafe
        self._source = PromptSource(
            settings.kafka,
            settings.run.run_id,
            Listener(
                requested=lambda place, event: _quietly(soon, self._requested, place, event),
                revoked=lambda partitions: _quietly(soon, self._revoked, partitions),
                undecodable=self._bury,
                ended=lambda failure: _quietly(soon, self._ended, failure),
            ),
        )

    async def run(self) -> int:
        """Exit status."""
        try:
            follower = await asyncio.to_thread(EventFollower, self._settings.kafka, [CONTROL, VERDICTS])
        except TransportError as away:
            log.error("no_log", error=away)  # noqa: TRY400 — the sentence says all
            return 1
        self._follow(follower)
        await self._stop.wait()
        await self._starting
        await self._cancel_all()
        await asyncio.to_thread(self._source.stop)
        await asyncio.to_thread(follower.close)
        if self._failure is not None:
            log.error("worker_ends", error=self._failure)
        return 0 if self._failure is None else 1

    def stop(self) -> None:
        """Finish: running groups are cancelled and stay uncommitted."""
        self._stop.set()

    # --- called on the loop ---

    def _requested(self, place: Place, event: GroupRequested) -> None:
        attempt = (event.group_id, event.attempt)
        if self._stop.is_set():
            return  # unfinished: our successor plays it
        if event.run_id != self._settings.run.run_id or attempt in self._closed or attempt in self._running:
            self._source.finish(place)  # another run's, decided already, or asked for twice
        else:
            task = self._loop.create_task(self._play(place, event))
            task.add_done_callback(self._played)
            self._running[attempt] = (place, task)

    def _played(self, task: asyncio.Task[None]) -> None:
        """A mistake of ours ends the process loudly; its prompt stays uncommitted."""
        if not task.cancelled() and (wrong := task.exception()) is not None:
            log.error("worker_broken", exc_info=wrong)
            self._ended(InvariantBroken(f"playing a group raised {type(wrong).__name__}: {wrong}"))

    async def _play(self, place: Place, event: GroupRequested) -> None:
        attempt = (event.group_id, event.attempt)
        try:
            async with self._slots:
                if attempt not in self._closed:
                    prompt = _prompt_of(event, self._payloads)
                    group = GroupAttempt(event.run_id, *attempt, size=event.group_size, prompt=prompt)
                    ends = await self._player.play(group)
                    log.debug("group_played", group_id=event.group_id, attempt=event.attempt, ends=dict(ends))
        except AttemptClosed:
            log.info("attempt_closed", group_id=event.group_id, attempt=event.attempt)
        except HoofprintError as wrong:
            # nobody can start this attempt: it fails by the feeder's time-out
            log.error("prompt_unusable", error=wrong, group_id=event.group_id)  # noqa: TRY400 — the sentence says all
        self._running.pop(attempt, None)
        self._source.finish(place)

    def _folded(self, event: Event) -> None:
        unwanted = self._closed.fold(event)
        for attempt in list(self._running) if self._closed.run_ended else [unwanted]:
            if attempt is not None and attempt in self._running:
                self._source.finish(self._abandon(attempt))

    def _revoked(self, partitions: set[int]) -> None:
        for attempt, (place, _) in list(self._running.items()):
            if place.partition in partitions:
                self._abandon(attempt)

    def _abandon(self, attempt: Attempt) -> Place:
        """Stop playing. At once out of `_running`: the same attempt may come back with its partition."""
        place, task = self._running.pop(attempt)
        task.cancel()
        self._cancelled.add(task)
        task.add_done_callback(self._cancelled.discard)
        return place

    async def _cancel_all(self) -> None:
        for attempt in list(self._running):
            self._abandon(attempt)
        await asyncio.gather(*self._cancelled, return_exceptions=True)

    def _ended(self, failure: HoofprintError | None) -> None:
        self._failure = self._failure or failure
        self._stop.set()

    # --- called in other threads ---

    def _follow(self, follower: EventFollower) -> None:
        """Prompts are read only when the closed attempts are known."""
        soon = self._loop.call_soon_threadsafe
        follower.follow(
            lambda _record, event: _quietly(soon, self._folded, event),
            lambda lost: _quietly(soon, self._ended, lost),
        )
        self._starting = self._loop.create_task(self._start_when_caught_up(follower))

    async def _start_when_caught_up(self, follower: EventFollower) -> None:
        while not self._stop.is_set():
            if await asyncio.to_thread(follower.wait_caught_up, 0.5):
                self._source.start()
                log.info("worker_ready", agent=self._settings.rollout.agent)
                return

    def _bury(self, message: Message, wrong: SchemaError) -> None:
        log.warning("dead_letter", error=wrong, partition=message.partition(), offset=message.offset())
        headers: Any = message.headers()  # the client's own type leaves open what it is a list of
        letter = letter_of(
            self._settings.run.run_id, PROMPTS.name, message.partition() or 0, message.offset() or 0,
            message.timestamp()[1], f"{wrong.code}: {wrong.message}", _bytes_or_none(message.key()),
            _bytes_or_none(message.value()), headers or (),
        )  # fmt: skip
        producer = AckProducer(self._settings.kafka, "rollout")
        try:
            producer.publish(letter)
        finally:
            producer.close()


def _quietly(soon: Any, callback: Any, *arguments: Any) -> None:
    """Hand a call to the loop; a loop that has ended needs nothing any more."""
    try:
        soon(callback, *arguments)
    except RuntimeError:
        log.debug("loop_has_ended")


def _bytes_or_none(key: str | bytes | None) -> bytes | None:
    return key.encode() if isinstance(key, str) else key


def _prompt_of(event: GroupRequested, payloads: PayloadStore) -> Mapping[str, Any]:
    raw = payloads.get(event.prompt_ref) if event.prompt_ref is not None else event.prompt or "null"
    try:
        prompt = orjson.loads(raw)
    except orjson.JSONDecodeError as wrong:
        raise IncompatibleEvent(
            f"the prompt of {event.group_id} is not JSON: {wrong}", group_id=event.group_id
        ) from wrong
    if not isinstance(prompt, dict):
        raise IncompatibleEvent(f"the prompt of {event.group_id} is not an object", group_id=event.group_id)
    return prompt


def proxy_url(settings: Settings) -> str:
    """Where the proxy answers; a proxy that listens on every interface is reached at the loopback."""
    host = "127.0.0.1" if settings.proxy.host in ("0.0.0.0", "::") else settings.proxy.host  # noqa: S104 — compared, not bound
    return f"http://{host}:{settings.proxy.port}"


def answers_path(settings: Settings) -> Path:
    """A file of this process's own."""
    return settings.run_directory / "answers" / f"worker-{time.time_ns():x}-{os.getpid()}.jsonl"


async def _work(settings: Settings) -> int:
    agent = load_agent(settings.rollout.agent)
    answers = AnswerLog(answers_path(settings))
    patience_s = settings.rollout.trajectory_timeout_s
    client = ProxyClient(proxy_url(settings), answers, patience_s, settings.proxy.admin_key)
    worker = Worker(settings, GroupPlayer(client, agent, settings.rollout.trajectory_timeout_s))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    try:
        return await worker.run()
    finally:
        await client.close()
        answers.close()


def main(settings: Settings) -> int:
    """Run until SIGTERM. Exit status 0, or 1 when it could not go on."""
    import uvloop

    configure_logging("rollout")
    return int(uvloop.run(_work(settings)))
