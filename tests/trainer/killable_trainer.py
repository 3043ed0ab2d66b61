"""The trainer in a process of its own that kills itself (SIGKILL) just before or after it publishes a given event.

Usage: killable_trainer.py SETTINGS_JSON before|after EVENT STEP
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from journal.producer import AckProducer, Position
from schemas.events import Event
from schemas.settings import Settings
from trainer.process import train


class KillingProducer(AckProducer):
    """Publishes like its base, until the event comes."""

    def publish(self, event: Event, timeout_s: float | None = None) -> Position:
        when, name, step = sys.argv[2:5]
        meant = type(event).__name__ == name and getattr(
            event, "step", getattr(event, "to_step", None)
        ) == int(step)
        if meant and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        position = super().publish(event, timeout_s)
        if meant:
            os.kill(os.getpid(), signal.SIGKILL)
        return position


if __name__ == "__main__":
    settings = Settings.from_json(Path(sys.argv[1]).read_text())
    train(settings, KillingProducer(settings.kafka, "trainer"))
