"""Engines that went, came back, or fell behind: each is looked after on its own, so that a broken one holds up nobody.

An engine that is there but has not the wanted weights gets them first; then a pause that a killed proxy left is ended, and
only then it is in rotation. Invariants: an update that runs at an engine has it alone (`Engine.changing`), and a catch-up that
runs is not waited for by updates of others; what failed is tried again after 1, 2, 4, … seconds, at once when another version
is wanted; a version that every engine has refused is given up for the one before it; proxies that share engines follow one
another instead of undoing what the other did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from proxy.control_view import ControlView
from proxy.engines import Engine, Wanted
from proxy.registry import EngineRegistry
from schemas.errors import EngineRejected, EngineTimeout, EngineUnavailable, HoofprintError

log = structlog.get_logger(__name__)

_PROBE_S = 1.0
_FIRST_S = 1.0
_LONGEST_S = 60.0


class Backoff:
    """When the next try may begin. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.failures = 0
        self._clock = clock
        self._not_before = 0.0
        self._about: Wanted | None = None

    def is_due(self, wanted: Wanted | None) -> bool:
        """Whether to try now; a version that was not tried yet may be."""
        return not self.failures or wanted != self._about or self._clock() >= self._not_before

    def failed(self, wanted: Wanted | None) -> float:
        """A try failed; seconds until the next."""
        self.failures = self.failures + 1 if wanted == self._about else 1
        self._about = wanted
        wait_s = min(_LONGEST_S, _FIRST_S * 2.0 ** min(self.failures - 1, 16))
        self._not_before = self._clock() + wait_s
        return wait_s

    def succeeded(self) -> None:
        """Begin from the start."""
        self.failures = 0


class CatchUp:
    """`joined`: told of every engine in rotation. `clock`: monotonic seconds."""

    def __init__(
        self, registry: EngineRegistry, control: ControlView, joined: Callable[[Engine], Awaitable[None]],
        update_timeout_s: float, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.backoff = {engine.engine_id: Backoff(clock) for engine in registry.engines}
        self._registry = registry
        self._control = control
        self._joined = joined
        self._update_timeout_s = update_timeout_s
        self._late: set[asyncio.Task[None]] = set()
        self._puzzling: dict[str, str] = {}
        """Labels that engines had in the place of the wanted one, and that the log did not know yet when they were seen."""
        registry.follow = self.follow

    async def first_look(self, limit_s: float) -> None:
        """Once at every engine, but return in time: one that hangs comes later."""
        looks = [asyncio.ensure_future(self.look_after(engine)) for engine in self._registry.engines]
        try:
            done, late = await asyncio.wait(looks, timeout=limit_s)
        except asyncio.CancelledError:
            for look in looks:
                look.cancel()
            raise
        self._late |= late
        for look in late:
            look.add_done_callback(self._late.discard)
        for look in done:
            look.result()

    async def watch(self) -> None:
        """Until cancelled."""
        try:
            await asyncio.gather(*(self._watch(engine) for engine in self._registry.engines))
        finally:
            for look in self._late:
                look.cancel()

    async def _watch(self, engine: Engine) -> None:
        while True:
            await asyncio.sleep(_PROBE_S)
            await self.look_after(engine)

    async def look_after(self, engine: Engine) -> None:
        """One look, and what follows from it."""
        if engine.changing.locked():
            return
        was_up = engine.up
        try:
            await engine.refresh()
        except HoofprintError as away:
            engine.in_rotation = False
            if was_up:
                log.warning("engine_away", engine=engine.engine_id, error=away)
            return
        if engine.draining or engine.changing.locked():
            return
        self.follow(engine)
        if was_up and self._may_be_news(engine):
            return
        if not was_up or not self._registry.is_usable(engine):
            await self._bring_in(engine)
        if self._registry.is_usable(engine) and not engine.changing.locked():
            await self._tell(engine)

    def _may_be_news(self, engine: Engine) -> bool:
        """Whether it may have been updated by another proxy a moment ago, whose word the log has not brought yet: then it is
        looked at once more before that is undone."""
        known = self._registry.is_current(engine) or engine.version in self._control.published
        if known or self._puzzling.get(engine.engine_id) == engine.version:
            self._puzzling.pop(engine.engine_id, None)
            return False
        self._puzzling[engine.engine_id] = engine.version
        return True

    async def _tell(self, engine: Engine) -> None:
        try:
            await self._joined(engine)
        except HoofprintError as failed:
            log.warning("activation_not_published", engine=engine.engine_id, error=failed)

    async def _bring_in(self, engine: Engine) -> None:
        self._choose()
        backoff = self.backoff[engine.engine_id]
        wanted = self._registry.wanted
        if not backoff.is_due(wanted):
            return
        async with engine.changing:
            try:
                await self._join(engine)
            except HoofprintError as failed:
                wait_s = backoff.failed(wanted)
                log.warning("catch_up_failed", engine=engine.engine_id, again_in_s=wait_s, error=failed)
                return
        backoff.succeeded()
        log.info("engine_joined", engine=engine.engine_id, version=engine.version)

    def follow(self, engine: Engine) -> None:
        """An engine with a newer published version was given it by another proxy, or after its update seemed to fail."""
        wanted, published = self._registry.wanted, self._control.published
        if engine.version in published.keys() - self._registry.overruled and (
            wanted is None or self._control.is_newer(engine.version, wanted[0])
        ):
            self._registry.wanted = engine.version, published[engine.version]

    def _choose(self) -> None:
        """With no engine in rotation, the newest published version is wanted: an update may have found no engine."""
        registry = self._registry
        if not registry.usable:
            hopeless = {version for version in registry.refused if registry.is_hopeless(version)}
            registry.wanted = self._control.newest(hopeless | registry.overruled) or registry.wanted

    async def _join(self, engine: Engine) -> None:
        """The wanted weights, then the end of a pause, then the rotation; once more if another version was wanted meanwhile."""
        while True:
            wanted = self._registry.wanted
            if wanted is not None and not engine.has(*wanted):
                engine.in_rotation = False
                version, checkpoint = wanted
                if checkpoint is None:
                    raise EngineUnavailable(
                        f"only an outer trainer can give it {version}", engine=engine.engine_id
                    )
                await load(engine, version, checkpoint, self._registry, self._update_timeout_s)
            await engine.go_on()
            if self._registry.wanted == wanted:
                break
        engine.in_rotation = True


async def load(
    engine: Engine,
    version: str,
    checkpoint: str,
    registry: EngineRegistry,
    timeout_s: float,
    *,
    abort: bool = True,
) -> None:
    """Give an engine weights. EngineRejected: it cannot have them (which is remembered); EngineTimeout; EngineUnavailable."""
    try:
        async with asyncio.timeout(timeout_s):
            await engine.update_weights(checkpoint, version, abort=abort)
    except EngineRejected:
        registry.refused.setdefault(version, set()).add(engine.engine_id)
        raise
    except TimeoutError as late:
        raise EngineTimeout(
            f"the engine did not load {version} within {timeout_s:g} s", engine=engine.engine_id
        ) from late
    registry.refused.pop(version, None)
