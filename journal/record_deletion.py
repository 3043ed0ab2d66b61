"""Records deleted at the broker, from the beginning of a partition up to an offset; and how far a consumer group has come.

Only whole beginnings go (Kafka's DeleteRecords): each partition at one stroke, and once more changes nothing. The broker frees
the room a log segment at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from journal.connection import LOGGER, client_configuration
from journal.topic_admin import partition_ids
from schemas.errors import TransportError
from schemas.settings import KafkaSettings
from schemas.topics import Topic

_CALL_S = 10.0


def committed_offsets(kafka: KafkaSettings, group: str, topic: Topic) -> dict[int, int]:
    """Per partition the offset that the group committed last; none for one of which it committed nothing."""
    name = topic.full_name(kafka.topic_prefix)
    spots = [TopicPartition(name, number) for number in partition_ids(kafka, topic)]
    client = AdminClient(client_configuration(kafka), logger=LOGGER)
    asked = [ConsumerGroupTopicPartitions(group, spots)]
    try:
        (answer,) = client.list_consumer_group_offsets(asked, request_timeout=_CALL_S).values()
        found = answer.result(_CALL_S).topic_partitions
    except (KafkaException, TimeoutError) as away:
        raise TransportError(f"offsets of {group} cannot be read", group=group, topic=name) from away
    return {spot.partition: spot.offset for spot in found if spot.error is None and spot.offset >= 0}


def delete_before(kafka: KafkaSettings, topic: Topic, before: Mapping[int, int]) -> dict[int, int]:
    """Delete everything below these offsets, per partition; the first offset of each that is left. TransportError: some
    partition may still be as it was."""
    name = topic.full_name(kafka.topic_prefix)
    client = AdminClient(client_configuration(kafka), logger=LOGGER)
    asked = [TopicPartition(name, partition, offset) for partition, offset in sorted(before.items())]
    try:
        answers = client.delete_records(asked, request_timeout=_CALL_S, operation_timeout=_CALL_S)
        return {spot.partition: answer.result(_CALL_S).low_watermark for spot, answer in answers.items()}
    except (KafkaException, TimeoutError) as refused:
        raise TransportError(f"records of {name} cannot be deleted: {refused}", topic=name) from refused
