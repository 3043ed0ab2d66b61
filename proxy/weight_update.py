"""A new version on all engines: gate closed, running generations cut or held, weights loaded, gate open.

`abort` cuts every engine call by its id; each generation keeps its tokens and resumes at the gate. `retract` lets the
engines hold their requests themselves. Invariants: one update at a time; nothing is loaded under a running generation
unless forced; an engine that fails, does not obey, or does not answer within its time leaves the rotation and holds up
nobody; if none took the weights, the old version goes on; whatever happens, the gate opens and no engine stays paused.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

import msgspec
import structlog

from journal.clock import Clock
from proxy.catch_up import CatchUp, load
from proxy.control_view import ControlView
from proxy.engines import Engine
from proxy.gate import Gate
from proxy.generation import Generation
from proxy.generation_control import GenerationController
from proxy.quiesce import quiesce
from proxy.recorder import Publisher
from proxy.registry import EngineRegistry
from schemas.errors import (
    EngineRejected,
    EngineUnavailable,
    HoofprintError,
    NotQuiesced,
    VersionConflict,
    VersionRefused,
)
from schemas.events import PolicyActivated, PolicyPublished, identified
from schemas.settings import Settings

log = structlog.get_logger(__name__)

REASON = "weight_update"
_FIRST_LOOK_S = 5.0
_POLL_S = 0.02

Failures = dict[str, HoofprintError]


class Version(NamedTuple):
    """A label with its checkpoint, and the trainer's step."""

    label: str
    checkpoint: str | None
    step: int | None


class Outcome(msgspec.Struct):
    """The answer of `POST /v1/policy/versions`. `preempted`: generations that were really cut; `running`: engine calls that
    did not end in time, whose engines were left out (or which were overruled by `force`)."""

    version: str
    activated: list[str]
    failed: dict[str, str]
    preempted: int
    quiesced: bool
    pause_ms: float
    running: list[str]


class WeightUpdates:
    """Brings versions to engines."""

    def __init__(
        self, registry: EngineRegistry, gate: Gate, controller: GenerationController, control: ControlView,
        producer: Publisher, settings: Settings, clock: Clock,
    ) -> None:  # fmt: skip
        self._registry = registry
        self._gate = gate
        self._controller = controller
        self._control = control
        self._producer = producer
        self._run_id = settings.run.run_id
        self._strategy = settings.proxy.update_strategy
        self._quiesce_s = settings.proxy.quiesce_timeout_s
        self._update_s = settings.proxy.update_timeout_s
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()
        self._publishing = asyncio.Lock()
        self._announcing = asyncio.Lock()
        self.catch_up = CatchUp(registry, control, self._announce, self._update_s, time.monotonic)

    async def at_start(self) -> None:
        """What a killed proxy may have left: engines of other versions, or paused. Engines that are away join later."""
        self._registry.wanted = self._control.newest()
        await self.catch_up.first_look(_FIRST_LOOK_S)

    async def adopt(self, version: str) -> None:
        """An outer trainer has changed the weights: ask the engines, publish the label if it is new, and say who has it.
        VersionConflict: no engine says this label."""
        async with self._one_at_a_time:
            await asyncio.gather(*map(self._registry.is_alive, self._registry.engines))
            labels = {engine.engine_id: engine.version for engine in self._registry.engines if engine.up}
            if version not in labels.values():
                raise VersionConflict("no engine says this version", version=version, engines=labels)
            await self._publish(Version(version, None, None))
            checkpoint = self._control.published[version]
            self._registry.wanted = version, checkpoint
            for engine in self._registry.engines:
                if engine.up and engine.version == version:
                    engine.accept(version, checkpoint or "")
                    await self._announce(engine)

    async def update(self, version: str, checkpoint: str, step: int | None, *, force: bool) -> Outcome:
        """The whole update. VersionConflict; NotQuiesced; VersionRefused, EngineUnavailable: no engine took it;
        TransportError: it cannot be published."""
        async with self._one_at_a_time:
            self._check(version, checkpoint, force=force)
            if self._is_active(version):
                for engine in self._registry.usable:
                    await self._announce(engine)
                return Outcome(version, [e.engine_id for e in self._registry.usable], {}, 0, True, 0.0, [])
            new = Version(version, checkpoint, step)
            targets = await self._targets(version)
            for engine in targets:
                await engine.changing.acquire()
            try:
                outcome = await self._update(targets, new, force=force)
            finally:
                for engine in targets:
                    engine.changing.release()
        log.info("policy_activated", **msgspec.to_builtins(outcome))
        return outcome

    def _check(self, version: str, checkpoint: str, *, force: bool) -> None:
        """A label has one checkpoint, and an engine does not go back to an older version by mistake."""
        known = self._control.published.get(version)
        if known is not None and known != checkpoint:
            raise VersionConflict(
                "the version was published with another checkpoint", version=version, published=known, given=checkpoint
            )  # fmt: skip
        wanted = self._registry.wanted
        if not force and wanted is not None and self._control.is_newer(wanted[0], version):
            raise VersionConflict(
                "the version is older than the active one; `force` goes back to it", version=version, active=wanted[0]
            )  # fmt: skip

    def _is_active(self, version: str) -> bool:
        wanted = self._registry.wanted
        return wanted is not None and wanted[0] == version and bool(self._registry.usable)

    async def _publish(self, new: Version) -> None:
        """Nothing where the log has the label."""
        async with self._publishing:
            if new.label in self._control.published:
                return
            event = identified(
                PolicyPublished(
                    run_id=self._run_id,
                    occurred_at=self._clock(),
                    version=new.label,
                    checkpoint_uri=new.checkpoint,
                    step=new.step,
                )
            )
            await self._producer.apublish(event)
            self._control.fold(event)

    async def _targets(self, version: str) -> list[Engine]:
        """Engines to update: one that is catching up is not waited for, unless there is no other."""
        deadline = time.monotonic() + self._update_s
        while True:
            there = [engine for engine in self._registry.engines if engine.up and not engine.draining]
            free = [engine for engine in there if not engine.changing.locked()]
            if free:
                return free
            if not there or time.monotonic() >= deadline:
                raise EngineUnavailable("no engine is there to take the version", version=version)
            await asyncio.sleep(_POLL_S)

    async def _update(self, targets: list[Engine], new: Version, *, force: bool) -> Outcome:
        begin = time.perf_counter()
        before = {g: g.preemptions for g in self._controller.running.values()}
        self._gate.close(REASON)
        try:
            failed, left = await self._bring(targets, new, force=force)
            self._rotate(targets, failed, new)
        finally:
            self._gate.open(REASON)
        pause_ms = round((time.perf_counter() - begin) * 1000, 3)
        cut = self._cut_since(before)
        activated = [engine.engine_id for engine in targets if engine.engine_id not in failed]
        for engine_id in activated:
            await self._activated(new.label, engine_id, cut[engine_id], pause_ms)
        reasons = {engine_id: failure.message for engine_id, failure in failed.items()}
        return Outcome(new.label, activated, reasons, cut.total(), not left, pause_ms, list(left))

    def _cut_since(self, before: dict[Generation, int]) -> Counter[str]:
        """Generations that were cut, by engine. One that ended by itself while its abort was under way was not (rule 9), nor
        was one that its engine holds: it goes on in the same call, and only its end tells (`TokenSegment.preemptions`)."""
        cut: Counter[str] = Counter()
        for generation, preemptions in before.items():
            if generation.preemptions > preemptions and generation.engine is not None:
                cut[generation.engine.engine_id] += 1
        return cut

    async def _bring(
        self, targets: list[Engine], new: Version, *, force: bool
    ) -> tuple[Failures, Iterable[str]]:
        """Stand still, load, go on. What failed, by engine, and the calls that did not stand still."""
        if self._strategy == "retract":
            return await self._bring_held(targets, new), []
        left = await quiesce(self._controller, self._quiesce_s)
        failed: Failures = {}
        if left and not force:
            failed = self._leave_out(targets, left, new.label)
        able = [engine for engine in targets if engine.engine_id not in failed]
        failed |= await self._load(able, new, abort=not force)
        return failed, left

    def _leave_out(self, targets: list[Engine], left: dict[str, Generation], version: str) -> Failures:
        """Engines whose calls do not end: the others go on without them, and their generations go on at the others."""
        stuck = {g.engine.engine_id: g.engine for g in left.values() if g.engine is not None}
        if stuck.keys() >= {engine.engine_id for engine in targets}:
            raise NotQuiesced(
                "generations still run; the update was refused", version=version, quiesced=False, running=list(left)
            )  # fmt: skip
        for engine in stuck.values():
            engine.in_rotation = False
            engine.cut()
        return {name: NotQuiesced("its generations did not end in time") for name in stuck}

    async def _bring_held(self, targets: list[Engine], new: Version) -> Failures:
        failed = await each(targets, lambda engine: self._in_time(engine.pause("retract"), "pause"))
        held = [engine for engine in targets if engine.engine_id not in failed]
        try:
            failed |= await self._load(held, new, abort=False)
        finally:
            stuck = await each(held, lambda engine: self._in_time(engine.go_on(), "go on"))
        for engine in targets:
            if engine.engine_id in failed | stuck and not isinstance(
                failed.get(engine.engine_id), EngineRejected
            ):
                engine.in_rotation = False  # it may be paused still: its generations go on elsewhere
                engine.cut()
        return failed | stuck

    async def _in_time(self, work: Awaitable[None], what: str) -> None:
        try:
            async with asyncio.timeout(self._quiesce_s):
                await work
        except TimeoutError as late:
            raise EngineUnavailable(f"the engine did not {what} within {self._quiesce_s:g} s") from late

    async def _load(self, engines: list[Engine], new: Version, *, abort: bool) -> Failures:
        """`abort`: what other proxies run there is cut as well; they resume it by themselves. The first engine that takes a new
        label puts it into the log, before anything runs under it: one that none takes has no place in the window."""

        async def bring(engine: Engine) -> None:
            await load(engine, new.label, new.checkpoint or "", self._registry, self._update_s, abort=abort)
            await self._publish(new)

        return await each(engines, bring)

    def _rotate(self, targets: list[Engine], failed: Failures, new: Version) -> None:
        """VersionRefused, EngineUnavailable: none took it; those that refused it go on with the old version."""
        if len(failed) < len(targets):
            self._registry.wanted = (new.label, new.checkpoint)
            newer = (v for v in self._control.published if self._control.is_newer(v, new.label))
            self._registry.overruled = set(newer)
            for engine in targets:
                engine.in_rotation = engine.engine_id not in failed
            return
        unsure = [e for e in targets if not isinstance(failed[e.engine_id], EngineRejected)]
        for engine in unsure:
            engine.in_rotation = False  # nobody knows what it has: its catch-up brings it in
        still = self._registry.wanted[0] if self._registry.wanted else None
        kind = EngineUnavailable if unsure else VersionRefused
        raise kind(
            f"no engine took {new.label}; the old version goes on", version=new.label, activated=[],
            failed={name: failure.message for name, failure in failed.items()}, still_active=still,
        )  # fmt: skip

    async def _announce(self, engine: Engine) -> None:
        """An engine has the wanted version: say so once."""
        async with self._announcing:
            wanted = self._registry.wanted
            known = (engine.version, engine.engine_id) in self._control.activated
            if wanted is not None and engine.version == wanted[0] and not known:
                await self._activated(engine.version, engine.engine_id, 0, 0.0)

    async def _activated(self, version: str, engine_id: str, preempted: int, pause_ms: float) -> None:
        event = PolicyActivated(
            run_id=self._run_id,
            occurred_at=self._clock(),
            version=version,
            engine_id=engine_id,
            preempted=preempted,
            pause_ms=pause_ms,
        )
        await self._producer.apublish(identified(event))
        self._control.fold(event)


async def each(engines: list[Engine], work: Callable[[Engine], Awaitable[None]]) -> Failures:
    """Do it at every engine; what failed, by engine."""
    results = await asyncio.gather(*(work(engine) for engine in engines), return_exceptions=True)
    failed: Failures = {}
    for engine, result in zip(engines, results, strict=True):
        if isinstance(result, HoofprintError):
            failed[engine.engine_id] = result
        elif isinstance(result, BaseException):
            raise result
    return failed
