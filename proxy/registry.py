"""The engines as a set: who may get a generation.

Invariants: an engine gets one only with the newest activated weights (or, before the first activation, with whatever it
serves), and never while an operator drains it; a session stays at its engine while that is usable, for its prefix cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal

from proxy.engines import Engine, Wanted
from schemas.errors import EngineUnavailable, HoofprintError
from schemas.versions import UNKNOWN

_ALIVE_S = 3.0

EngineState = Literal["up", "waiting", "behind", "draining", "down"]


def _ignore(_engine: Engine) -> None:
    pass


class EngineRegistry:
    """`wanted`: (version, checkpoint) that every engine must have; None: as they are. `refused`: engines by the version that
    they could not load. `overruled`: versions newer than the wanted one, since an operator went back. `follow`: want what an
    engine has, if it is newer."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)
        self.wanted: Wanted | None = None
        self.refused: dict[str, set[str]] = {}
        self.overruled: set[str] = set()
        self.follow: Callable[[Engine], None] = _ignore

    @property
    def usable(self) -> list[Engine]:
        """Engines that may get a generation."""
        return [engine for engine in self.engines if self.is_usable(engine)]

    def is_usable(self, engine: Engine) -> bool:
        """Whether it may get a generation."""
        return engine.usable and self.is_current(engine)

    def is_current(self, engine: Engine) -> bool:
        """Whether it has the wanted weights."""
        return self.wanted is None or engine.has(*self.wanted)

    def is_hopeless(self, version: str) -> bool:
        """Whether every engine that is there has refused this version."""
        refused = self.refused.get(version, set())
        there = [engine.engine_id for engine in self.engines if engine.up and not engine.draining]
        return bool(there) and refused.issuperset(there)

    async def is_alive(self, engine: Engine) -> bool:
        """Whether it answers now: a connection may break without its engine."""
        try:
            async with asyncio.timeout(_ALIVE_S):
                await engine.refresh()
        except (HoofprintError, TimeoutError):
            return False
        return True

    async def heard(self, engine: Engine, version: str) -> None:
        """A call ended with this label. If it is not the wanted one, the engine was started anew since it was asked last, or
        another proxy has updated it: ask it; if it has not what is wanted, it is out until it was looked after."""
        if self.wanted is None or version in (self.wanted[0], UNKNOWN) or engine.changing.locked():
            return
        await self.is_alive(engine)
        self.follow(engine)
        engine.in_rotation = engine.in_rotation and self.is_current(engine)

    def find(self, engine_id: str) -> Engine | None:
        """The engine of this id."""
        return next((engine for engine in self.engines if engine.engine_id == engine_id), None)

    def pick(self, sticky: str | None, avoid: set[str]) -> Engine:
        """The session's engine if it is usable, else the least loaded. EngineUnavailable with none."""
        usable = [e for e in self.usable if e.engine_id not in avoid]
        if not usable:
            raise EngineUnavailable(
                "no engine can take the request", engines={e.engine_id: self.state(e) for e in self.engines}
            )
        for engine in usable:
            if engine.engine_id == sticky:
                return engine
        return min(usable, key=lambda e: e.inflight)

    def state(self, engine: Engine) -> EngineState:
        """One word for people; `behind`: without the wanted weights, `waiting`: to be let go on."""
        if engine.draining:
            return "draining"
        if not engine.up:
            return "down"
        if not self.is_current(engine):
            return "behind"
        return "up" if engine.in_rotation else "waiting"

    def limit(self, name: str) -> int | None:
        """The smallest known limit (`vocab_size`, `context_length`) over the engines."""
        known = [getattr(e, name) for e in self.engines if getattr(e, name) is not None]
        return min(known) if known else None
