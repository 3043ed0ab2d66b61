"""The proxy process: `main(settings)` serves until SIGTERM and says by its exit status why it ended.

SIGTERM: no new requests, what is in flight gets a few seconds, records in flight are acknowledged; a client that was cut
comes back with its session token. The log lost for good: exit 1, and the supervisor starts a successor.
"""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import os
import signal
import sys
from collections.abc import Iterator

import structlog
import uvicorn

from journal.clock import system_clock
from journal.log_setup import configure_logging
from proxy.app import build_app
from proxy.patient_http import patient
from schemas.errors import ConfigError, HoofprintError
from schemas.settings import Settings
from schemas.settings_sections import ProxySettings

log = structlog.get_logger(__name__)

_GRACE_S = 3
CANNOT_WORK = 2
_COLLECT = (20_000, 20, 50)
"""A turn makes some hundred objects and leaves no cycles; the default looks for some with every other turn."""


def _without_torch() -> None:
    """transformers brings torch with the first tokenizer, where it finds it: 0.4 GB and seconds of a request, and nothing here
    computes."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def check_exposure(proxy: ProxySettings) -> None:
    """ConfigError: the port would be open to other machines without a key."""
    if proxy.admin_key or proxy.host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(proxy.host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            f"proxy.host {proxy.host} is not a loopback address: set proxy.admin_key", key="proxy.admin_key"
        )


class Server(uvicorn.Server):
    """uvicorn, with a failure that ends it. `failed`: why."""

    failed: HoofprintError | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn raises the signal again after the shutdown; a clean end is exit status 0 here."""
        before = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def fail(self, failure: HoofprintError) -> None:
        """End the process with a non-zero status."""
        if self.failed is None:
            self.failed = failure
            log.error("proxy_ends", error=failure)
        self.should_exit = True


def main(settings: Settings) -> int:
    """Exit status: 0 after SIGTERM, 1 after an infrastructure error, 2 if it is configured so that it must not start."""
    configure_logging("proxy")
    try:
        check_exposure(settings.proxy)
    except ConfigError as unsafe:
        log.error("proxy_ends", error=unsafe)  # noqa: TRY400 — its place in the code tells nobody anything
        return CANNOT_WORK
    _without_torch()
    gc.freeze()  # what was imported stays: no collection shall look through it again and again
    gc.set_threshold(*_COLLECT)
    servers: list[Server] = []

    def fail(failure: HoofprintError) -> None:
        servers[0].fail(failure)

    app = build_app(settings, system_clock, fail)
    configuration = uvicorn.Config(
        app,
        host=settings.proxy.host,
        port=settings.proxy.port,
        loop="uvloop",
        http=patient(settings.proxy.client_send_s),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_GRACE_S,
        backlog=4096,
    )
    server = Server(configuration)
    servers.append(server)
    try:
        server.run()
    except HoofprintError as failure:
        server.fail(failure)
    except SystemExit:
        return 1  # uvicorn has said why (the port is taken)
    finally:
        gc.unfreeze()  # libraries that look for leaks at the exit find none
    return 0 if server.failed is None and server.started else 1
