"""What every Kafka client of ours is configured with: where the broker is, and how to come back to it after a restart."""

from __future__ import annotations

import logging
from typing import Any

from schemas.errors import ConfigError
from schemas.settings import KafkaSettings

LOGGER = logging.getLogger("librdkafka")


def client_configuration(kafka: KafkaSettings) -> dict[str, Any]:
    """ConfigError without bootstrap servers: `hoofprint up` fills them in before any process starts."""
    if not kafka.bootstrap_servers:
        raise ConfigError("kafka.bootstrap_servers is empty", key="kafka.bootstrap_servers")
    return {
        "bootstrap.servers": kafka.bootstrap_servers,
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 500,  # the default of 10 s would sleep through the return of a broker
        "log_level": 2,  # a line per connection attempt is noise: what matters comes as an error of a call
    }
