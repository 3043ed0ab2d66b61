"""The trainer as a process.

Real parts put together, the stop signal, one sentence for an error that ends it.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import structlog

from journal.clock import Clock, system_clock
from journal.event_log import EventFollower
from journal.log_setup import configure_logging
from journal.payloads import PayloadStore
from journal.producer import AckProducer
from schemas.errors import ConfigError, HoofprintError
from schemas.settings import Settings
from schemas.topics import BATCHES, CONTROL
from trainer.batches import BatchReader
from trainer.loop import Trainer
from trainer.publication import ProxyGate, Publication
from trainer.step import optimizer_of

LOG = structlog.get_logger()
POLL_S = 0.2


def main(settings: Settings) -> int:
    """Run the trainer of `settings` until it is done or told to stop."""
    configure_logging("trainer")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # every moment is safe: see trainer.loop
    try:
        train(settings, AckProducer(settings.kafka, "trainer"))
    except HoofprintError as error:
        LOG.critical("trainer stops", error=error)
        return 1
    return 0


def train(settings: Settings, producer: AckProducer, clock: Clock = system_clock) -> None:
    """Put the trainer together from real parts and run it."""
    from trainer.backends.torch_backend import TorchBackend, make_deterministic

    if not settings.engine.model:
        raise ConfigError(
            "engine.model is empty: the trainer starts from that checkpoint", key="engine.model"
        )
    options = settings.trainer
    make_deterministic(seed=settings.run.seed, threads=options.threads)
    backend = TorchBackend(
        Path(settings.engine.model), optimizer_of(options), temperature=options.temperature
    )
    publication = Publication(
        settings.run_directory / "policies",
        backend.export,
        producer.publish,
        ProxyGate(settings.proxy, options.publication_patience_s),
        clock,
    )
    reader = BatchReader(
        PayloadStore(settings.payload_url).open_arrow,
        mask_nonlast=settings.staleness.mask_nonlast_version_tokens,
        std="bessel" if options.normalise_std else "none",
    )
    follower = EventFollower(settings.kafka, [CONTROL, BATCHES])
    try:
        trainer = Trainer(
            settings,
            backend,
            producer,
            reader,
            publication,
            lambda: [event for _, event in follower.poll(POLL_S)],
            clock,
        )
        follower.catch_up(lambda _record, event: trainer.view.apply(event))
        trainer.run()
    finally:
        follower.close()
        producer.close()
