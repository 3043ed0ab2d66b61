"""What every test may ask for: `kafka`, one real broker per test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def kafka() -> Iterator[str]:
    """Bootstrap servers of an embedded broker, data temporary; tests keep apart by topic and group names."""
    from stack.broker.embedded import EmbeddedKafka

    with EmbeddedKafka() as broker:
        yield broker.bootstrap_servers
