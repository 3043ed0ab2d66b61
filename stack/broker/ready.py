"""When a broker is ready: it answers, it is part of its own cluster, and every partition has a leader.

The last two matter after a kill -9: until its old registration has expired the broker answers with an empty
cluster.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from schemas.errors import TransportError

_PAUSE_S = 0.05


def await_broker(
    bootstrap_servers: str, timeout_s: float = 60.0, alive: Callable[[], bool] = lambda: True
) -> None:
    """Return when it is ready; TransportError when time is up or `alive` says that its process has ended."""
    deadline = time.monotonic() + timeout_s
    admin: AdminClient | None = None
    while time.monotonic() < deadline and alive():
        if admin is None and _listens(bootstrap_servers):
            # Not before: librdkafka waits ever longer after each refused connection.
            admin = AdminClient(
                {"bootstrap.servers": bootstrap_servers, "log_level": 0, "reconnect.backoff.max.ms": 100}
            )
        if admin is not None and _is_whole(admin):
            return
        time.sleep(_PAUSE_S)
    why = f"did not get ready within {timeout_s:g} s" if alive() else "ended before it was ready"
    raise TransportError(f"The broker at {bootstrap_servers} {why}.", bootstrap_servers=bootstrap_servers)


def _listens(bootstrap_servers: str) -> bool:
    for server in bootstrap_servers.split(","):
        host, _, port = server.strip().rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=1.0):
                return True
        except OSError:
            continue
    return False


def _is_whole(admin: AdminClient) -> bool:
    try:
        cluster = admin.list_topics(timeout=1.0)
    except KafkaException:
        return False
    leaders = [
        partition.leader for topic in cluster.topics.values() for partition in topic.partitions.values()
    ]
    return bool(cluster.brokers) and -1 not in leaders
