"""Topics at the broker: created with the partitions and the retention that design §3 names and room for large records, and
checked when present.

Nothing is deleted by retention (Kafka's default would after 7 days), so a present topic with another retention is a
configuration error, not something to change behind the operator's back.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType  # type: ignore[attr-defined]

from journal.connection import LOGGER, client_configuration
from schemas.errors import ConfigError, TransportError
from schemas.settings import KafkaSettings
from schemas.topics import ALL_TOPICS, RETENTION, SIZES, Topic

_PATIENCE_S = 30.0
_CALL_S = 10.0
_POLL_S = 0.05


def wait_for_broker(kafka: KafkaSettings, timeout_s: float) -> None:
    """Return when a broker answers; TransportError when none does in time."""
    admin, deadline = _admin(kafka), time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            if admin.list_topics(timeout=max(0.1, min(left, 2.0))).brokers:
                return
        except KafkaException as away:
            if left <= 0:
                raise TransportError(
                    f"no Kafka broker answers at {kafka.bootstrap_servers}",
                    bootstrap_servers=kafka.bootstrap_servers,
                    timeout_s=timeout_s,
                ) from away
        time.sleep(_POLL_S)


def create_topics(kafka: KafkaSettings, topics: Iterable[Topic] = ALL_TOPICS) -> None:
    """Create the missing, check the present, and return when every partition has a leader.

    ConfigError: a present topic has other partitions, another retention or less room for a record. TransportError: the broker
    does not answer.
    """
    wanted = {topic.full_name(kafka.topic_prefix): topic for topic in topics}
    admin = _admin(kafka)
    present = set(_metadata(admin, kafka)) & set(wanted)
    _create(admin, kafka, {name: topic for name, topic in wanted.items() if name not in present})
    _await_leaders(admin, kafka, wanted)
    _check_settings(admin, sorted(wanted))


def number_of_partitions(kafka: KafkaSettings, topic: Topic) -> int:
    """How many partitions the topic has at the broker. TransportError if it is not there."""
    return len(partition_ids(kafka, topic))


def partition_ids(kafka: KafkaSettings, topic: Topic) -> list[int]:
    """The topic's partitions at the broker. TransportError if it is not there."""
    name = topic.full_name(kafka.topic_prefix)
    found = _metadata(_admin(kafka), kafka).get(name)
    if not found:
        raise TransportError(f"there is no topic {name} at {kafka.bootstrap_servers}", topic=name)
    return sorted(found)


def partition_of(key: bytes, partitions: int) -> int:
    """Where our producers put a key: librdkafka's `consistent` partitioner, CRC-32 modulo the partitions."""
    return zlib.crc32(key) % partitions


def broker_setting(kafka: KafkaSettings, name: str) -> str | None:
    """A setting of one of the brokers; None if it has none of this name. TransportError: no broker answers."""
    admin = _admin(kafka)
    try:
        broker = min(admin.list_topics(timeout=_CALL_S).brokers)
        (answer,) = admin.describe_configs(
            [ConfigResource(ResourceType.BROKER, str(broker))], request_timeout=_CALL_S
        ).values()
        entry = answer.result(_PATIENCE_S).get(name)
    except (KafkaException, ValueError) as away:
        raise TransportError(f"settings of the broker at {kafka.bootstrap_servers} cannot be read") from away
    return None if entry is None else entry.value


def _admin(kafka: KafkaSettings) -> AdminClient:
    return AdminClient(client_configuration(kafka), logger=LOGGER)


def _metadata(admin: AdminClient, kafka: KafkaSettings) -> dict[str, dict[int, int]]:
    """Per topic: partition and its leader (-1: none)."""
    try:
        topics = admin.list_topics(timeout=_CALL_S).topics
    except KafkaException as away:
        raise TransportError(
            f"no Kafka broker answers at {kafka.bootstrap_servers}", bootstrap_servers=kafka.bootstrap_servers
        ) from away
    return {
        name: {number: partition.leader for number, partition in found.partitions.items()}
        for name, found in topics.items()
        if found.error is None
    }


def _create(admin: AdminClient, kafka: KafkaSettings, missing: dict[str, Topic]) -> None:
    new = [
        NewTopic(
            name,
            num_partitions=topic.partitions or kafka.partitions,
            replication_factor=kafka.replication_factor,
            config={**RETENTION, **{key: str(least) for key, least in SIZES.items()}},
        )
        for name, topic in missing.items()
    ]
    if not new:
        return
    for name, created in admin.create_topics(new, operation_timeout=_CALL_S).items():
        try:
            created.result(_PATIENCE_S)
        except KafkaException as refused:
            if refused.args[0].name() == "TOPIC_ALREADY_EXISTS":
                continue  # another process was faster; what it made is checked like everything else
            raise TransportError(
                f"topic {name} cannot be created: {refused.args[0].str()}", topic=name
            ) from refused


def _check_settings(admin: AdminClient, names: list[str]) -> None:
    resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
    for resource, answer in admin.describe_configs(resources, request_timeout=_CALL_S).items():
        try:
            entries = answer.result(_PATIENCE_S)
        except KafkaException as refused:
            raise TransportError(
                f"settings of topic {resource.name} cannot be read", topic=resource.name
            ) from refused
        for key, wanted in RETENTION.items():
            found = entries[key].value
            if found != wanted:
                raise ConfigError(
                    f"topic {resource.name} has {key}={found}, the log needs {wanted}",
                    topic=resource.name, setting=key, found=found, wanted=wanted,
                )  # fmt: skip
        for key, least in SIZES.items():
            size = entries[key].value
            if size is None or int(size) < least:
                raise ConfigError(
                    f"topic {resource.name} has {key}={size}, the log needs at least {least}",
                    topic=resource.name, setting=key, found=size, wanted=least,
                )  # fmt: skip


def _await_leaders(admin: AdminClient, kafka: KafkaSettings, wanted: dict[str, Topic]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        found = _metadata(admin, kafka)
        waiting = [name for name in wanted if not found.get(name) or min(found[name].values()) < 0]
        if not waiting:
            break
        if time.monotonic() > deadline:
            raise TransportError(f"topics without a leader: {', '.join(waiting)}", topics=waiting)
        time.sleep(_POLL_S)
    for name, topic in wanted.items():
        partitions = topic.partitions or kafka.partitions
        if len(found[name]) != partitions:
            raise ConfigError(
                f"topic {name} has {len(found[name])} partitions, the settings say {partitions}",
                topic=name, found=len(found[name]), wanted=partitions,
            )  # fmt: skip
