"""The application: the parts come to life with its lifespan, and the routes with them.

FastAPI holds the routes and the lifespan; the endpoints are plain ASGI (see `asgi.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from journal.clock import Clock
from proxy.front import Front
from proxy.parts import Parts, report
from proxy.routes import add_routes
from schemas.errors import HoofprintError
from schemas.settings import Settings


def build_app(settings: Settings, clock: Clock, on_failure: Callable[[HoofprintError], None]) -> Front:
    """The application; its parts come to life with its lifespan and stand in `app.state.parts`."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Front) -> AsyncIterator[None]:
        parts = Parts(settings, clock, on_failure)
        app.state.parts = parts
        starting = asyncio.ensure_future(parts.start())
        parts.tasks.append(starting)
        starting.add_done_callback(lambda task: report(task, on_failure))
        add_routes(app, parts)
        try:
            yield
        finally:
            await parts.stop()

    return Front(title="Hoofprint proxy", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
