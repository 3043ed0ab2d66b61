"""How long the embedded Kafka needs until a client can use it: first start, later start, after kill -9 with its data."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.figures import Figure, publish
from stack.broker.embedded import EmbeddedKafka

ROUNDS = 3


def _seconds_to_ready(broker: EmbeddedKafka) -> float:
    began = time.perf_counter()
    broker.start()
    return time.perf_counter() - began


def measure(directory: Path) -> dict[str, float]:
    """Seconds of one round: first, later, after_kill."""
    broker = EmbeddedKafka(directory)
    seconds = {"first": _seconds_to_ready(broker)}
    broker.stop()
    seconds["later"] = _seconds_to_ready(broker)
    broker.kill()
    seconds["after_kill"] = _seconds_to_ready(broker)
    began = time.perf_counter()
    broker.stop()
    seconds["stop"] = time.perf_counter() - began
    return seconds


def main() -> None:
    """Three rounds; the worst of each is published."""
    rounds = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as scratch:
            rounds.append(measure(Path(scratch) / "data"))
    worst = {key: max(r[key] for r in rounds) for key in rounds[0]}
    median = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    goals = {"first": "<= 8", "later": "<= 6", "after_kill": "<= 7", "stop": "<= 5"}
    names = {
        "first": "ready, first start",
        "later": "ready, later start",
        "after_kill": "ready, after kill -9",
        "stop": "clean stop",
    }
    publish(
        "broker",
        [Figure(names[key], "s", round(worst[key], 2), goals[key]) for key in names],
        note=f"worst of {ROUNDS}; medians: " + ", ".join(f"{key} {median[key]:.1f}" for key in names),
    )


if __name__ == "__main__":
    main()
