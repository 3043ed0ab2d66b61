"""`hoofprint up`: one run from its settings to its end.

Order: claim the directory, fill in the addresses, write settings.json, start the broker, create the topics, publish
`RunConfigured` (once per run: its settings are the only ones that the fold knows), start everything else. An existing
directory goes on where it was: the log says what is left to do. A run ends when its trainer is done: prompts stop first,
then `RunEnded` gives every open group its verdict, then the archive is brought up to the end of the log.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from journal.clock import Clock, system_clock
from journal.event_log import EventFollower, read_events
from journal.producer import AckProducer
from journal.reader import TopicReader
from journal.topic_admin import create_topics, wait_for_broker
from schemas.errors import ConfigError, InvariantBroken
from schemas.events import EndOfBatches, Event, GroupAdmitted, RunConfigured, RunEnded, Verdict, identified
from schemas.settings import Settings
from schemas.topics import BATCHES, CONTROL, VERDICTS
from stack.begun import as_begun, first_configuration
from stack.checkpoints import check_model
from stack.plan import ALL, BROKER, CHECKPOINT, ENGINE, FEEDER, PROXY, TRAINER, parts_of, resolve
from stack.release import software_version
from stack.run_directory import SUPERVISOR, await_predecessors, claim, write_settings
from stack.supervisor import Say, Supervisor

_BROKER_PATIENCE_S = 30.0
_PREDECESSOR_PATIENCE_S = 20.0
_END_PATIENCE_S = 60.0


class Stack:
    """A run that is up. Made by `running`."""

    def __init__(self, settings: Settings, supervisor: Supervisor, say: Say, clock: Clock) -> None:
        self.settings = settings
        self.supervisor = supervisor
        self._say = say
        self._clock = clock

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.settings.run_directory

    @property
    def proxy_url(self) -> str:
        """Where agents go."""
        return f"http://127.0.0.1:{self.settings.proxy.port}"

    async def start_log(self) -> None:
        """The broker and its topics. The first weights are made, and the engine loads them, meanwhile."""
        kafka = self.settings.kafka
        self.supervisor.start([BROKER, CHECKPOINT, ENGINE])
        if BROKER in self.supervisor.restarts():
            await self.supervisor.wait_ready([BROKER])
        else:
            await asyncio.to_thread(wait_for_broker, kafka, _BROKER_PATIENCE_S)
        await asyncio.to_thread(create_topics, kafka)
        self._say(f"log at {kafka.bootstrap_servers}")

    async def trained(self) -> None:
        """Until the trainer is done. Raises PartFailed."""
        await self.supervisor.wait_done(TRAINER)

    async def end(self, reason: str) -> None:
        """End the run: nothing new begins, every open group gets its verdict, then all processes stop.

        InvariantBroken: the controller did not decide every admitted group in time (the processes stop nevertheless).
        """
        sources = [
            name for name in self.supervisor.restarts() if name == FEEDER or name.startswith("rollout")
        ]
        await self.supervisor.stop(sources)
        try:
            await asyncio.to_thread(self._publish_end, reason)
            await asyncio.to_thread(self._await_verdicts)
        finally:
            await self.supervisor.stop()

    def _publish_end(self, reason: str) -> None:
        producer = AckProducer(self.settings.kafka, "hoofprint")
        try:
            producer.publish(
                identified(
                    RunEnded(run_id=self.settings.run.run_id, occurred_at=self._clock(), reason=reason)
                )
            )
        finally:
            producer.close()

    def _await_verdicts(self) -> None:
        follower = EventFollower(self.settings.kafka, [CONTROL, VERDICTS, BATCHES])
        fates = Fates(self.settings.run.run_id)
        deadline = self._clock() + int(_END_PATIENCE_S * 1e6)
        try:
            while not (follower.caught_up() and fates.settled):
                for _, event in follower.poll(0.2):
                    fates.fold(event)
                if self._clock() > deadline:
                    raise InvariantBroken(
                        f"{len(fates.undecided)} admitted groups have no terminal verdict after the end of the run",
                        groups=sorted(fates.undecided)[:20],
                        end_of_batches=fates.ended,
                    )
        finally:
            follower.close()


class Fates:
    """A fold: which admitted groups have no terminal verdict yet, and whether the batches have ended."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._admitted: set[str] = set()
        self._decided: set[str] = set()
        self.ended = False

    def fold(self, event: Event) -> None:
        """Take one event; order and repetition do not matter."""
        if event.run_id != self._run_id:
            return
        if isinstance(event, GroupAdmitted):
            self._admitted.add(event.group_id)
        elif isinstance(event, Verdict) and event.outcome != "retry":
            self._decided.add(event.group_id)
        elif isinstance(event, EndOfBatches):
            self.ended = True

    @property
    def undecided(self) -> set[str]:
        """Admitted without a terminal verdict."""
        return self._admitted - self._decided

    @property
    def settled(self) -> bool:
        """Nothing more will be decided."""
        return self.ended and not self.undecided


@asynccontextmanager
async def running(
    settings: Settings, say: Say = print, clock: Clock = system_clock, roles: frozenset[str] = ALL
) -> AsyncIterator[Stack]:
    """The processes of these roles; on leaving they are stopped, whatever happened. ConfigError, PartFailed, TransportError."""
    check_model(settings)
    lock = claim(settings.run_directory)
    try:
        await asyncio.to_thread(await_predecessors, settings.run_directory, _PREDECESSOR_PATIENCE_S)
        resolved = await asyncio.to_thread(resolve, settings, roles)
        write_settings(resolved)
        foreign = {BROKER} if settings.kafka.bootstrap_servers else set()
        foreign |= {ENGINE} if settings.proxy.engines else set()
        parts = parts_of(resolved, roles - foreign)
        directory = resolved.run_directory
        supervisor = Supervisor(parts, directory / "logs", directory / SUPERVISOR, say)
        stack = Stack(resolved, supervisor, say, clock)
        try:
            await stack.start_log()
            if PROXY in roles:
                stack.settings = await asyncio.to_thread(configure_run, settings, resolved, say, clock)
                write_settings(stack.settings)
            supervisor.start()
            await supervisor.wait_ready()
            yield stack
        finally:
            await supervisor.stop()
    finally:
        os.close(lock)


def configure_run(
    settings: Settings, resolved: Settings, say: Say = print, clock: Clock = system_clock
) -> Settings:
    """Publish `RunConfigured` if the log has none of this run. The text is the settings as given: addresses and paths of
    one machine are no part of the run. Gives `resolved` with what the run began with. ConfigError: the run has ended, or the
    settings do not go with those."""
    reader = TopicReader(resolved.kafka, [CONTROL])
    try:
        found = [
            e
            for _, e in read_events(reader.read_to_end(), lambda *_: None)
            if e.run_id == settings.run.run_id
        ]
    finally:
        reader.close()
    if any(isinstance(event, RunEnded) for event in found):
        raise ConfigError(
            f"run {settings.run.run_id} has ended; give another run.run_id", run_id=settings.run.run_id
        )
    first = first_configuration(found)
    if first is not None:
        begun, changed = as_begun(resolved, first)
        if changed:
            say(f"the run goes on as it began: {', '.join(changed)}")
        return begun
    event = RunConfigured(
        run_id=settings.run.run_id,
        occurred_at=clock(),
        settings=settings.to_json(),
        settings_digest=settings.digest(),
        software=f"hoofprint {software_version()}",
    )
    producer = AckProducer(resolved.kafka, "hoofprint")
    try:
        producer.publish(identified(event))
    finally:
        producer.close()
    return resolved


async def up(
    settings: Settings, say: Say = print, stop: Callable[[asyncio.Event], None] | None = None
) -> None:
    """Run until the trainer is done (then the run ends) or until the event that `stop` was given is set (it may go on later)."""
    asked = asyncio.Event()
    if stop is not None:
        stop(asked)
    async with running(settings, say) as stack:
        say(f"agents go to {stack.proxy_url}/v1; everything of the run is in {stack.directory}")
        trained = asyncio.create_task(stack.trained())
        stopped = asyncio.create_task(asked.wait())
        failed = asyncio.create_task(stack.supervisor.wait_failed())
        await asyncio.wait([trained, stopped, failed], return_when=asyncio.FIRST_COMPLETED)
        for task in (stopped, failed):
            task.cancel()
        if trained.done():
            trained.result()
            say("training is done; the run ends")
            await stack.end("trained")
        elif failed.done() and not failed.cancelled():
            failed.result()
        else:
            say("stopping; the same command goes on from here")
        trained.cancel()
