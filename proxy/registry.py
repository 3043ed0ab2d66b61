"""The engines as a set: who may get a generation, who fell behind, who came back.

Invariants: an engine is in rotation only with the newest activated version (or, before the first activation, with
whatever it serves); one that comes back or joins late gets the current weights first; a session stays at its engine
while that is usable, for its prefix cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from proxy.engines import Engine
from schemas.errors import EngineUnavailable, HoofprintError

log = structlog.get_logger(__name__)

_PROBE_S = 1.0


async def _quietly(_engine: Engine) -> None:
    pass


class EngineRegistry:
    """`wanted`: (version, checkpoint) that every engine must have; None: as they are. `newest`: what the log has published;
    `joined`: told of every engine that comes into rotation."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)
        self.wanted: tuple[str, str] | None = None
        self.newest: Callable[[], tuple[str, str] | None] = lambda: None
        self.joined: Callable[[Engine], Awaitable[None]] = _quietly
        self.updating = asyncio.Lock()

    @property
    def usable(self) -> list[Engine]:
        """Engines that may get a generation."""
        return [engine for engine in self.engines if self._is_usable(engine)]

    def _is_usable(self, engine: Engine) -> bool:
        return engine.usable and (self.wanted is None or engine.version == self.wanted[0])

    async def is_alive(self, engine: Engine) -> bool:
        """Whether it answers now: a connection may break without its engine."""
        try:
            await engine.refresh()
        except HoofprintError:
            return False
        return True

    def pick(self, sticky: str | None, avoid: set[str]) -> Engine:
        """The session's engine if it is usable, else the least loaded. EngineUnavailable with none."""
        usable = [e for e in self.usable if e.engine_id not in avoid]
        if not usable:
            raise EngineUnavailable(
                "no engine can take the request",
                engines={e.engine_id: "up" if e.up else "down" for e in self.engines},
            )
        for engine in usable:
            if engine.engine_id == sticky:
                return engine
        return min(usable, key=lambda e: e.inflight)

    def limit(self, name: str) -> int | None:
        """The smallest known limit (`vocab_size`, `context_length`) over the engines."""
        known = [getattr(e, name) for e in self.engines if getattr(e, name) is not None]
        return min(known) if known else None

    async def join(self, engine: Engine) -> None:
        """Bring one engine into rotation: end a pause a killed proxy left, and give it the wanted weights."""
        await engine.refresh()
        if self.wanted is not None and engine.version != self.wanted[0]:
            engine.in_rotation = False
            version, checkpoint = self.wanted
            await engine.update_weights(checkpoint, version)
            log.info("engine_brought_up_to_date", engine=engine.engine_id, version=version)
        await engine.go_on()
        engine.in_rotation = True
        await self.joined(engine)

    async def watch(self) -> None:
        """Until cancelled: notice engines that went or came back."""
        while True:
            await asyncio.gather(*(self._probe(engine) for engine in self.engines))
            await asyncio.sleep(_PROBE_S)

    async def _probe(self, engine: Engine) -> None:
        was_up = engine.up
        try:
            if self.updating.locked():
                return  # an update decides about its engines itself
            await engine.refresh()
            behind = self.wanted is not None and engine.version != self.wanted[0]
            if not was_up or behind or not engine.in_rotation:
                async with self.updating:
                    if not self.usable:
                        self.wanted = (
                            self.newest() or self.wanted
                        )  # an update found no engine: it is made up for now
                    await self.join(engine)
                log.info("engine_joined", engine=engine.engine_id, version=engine.version)
        except HoofprintError as away:
            if was_up:
                log.warning("engine_away", engine=engine.engine_id, error=away)
