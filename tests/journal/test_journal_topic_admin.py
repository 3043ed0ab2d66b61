"""Topics as design §3 wants them."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from journal.producer import AckProducer
from journal.reader import TopicReader
from journal.topic_admin import broker_setting, create_topics, number_of_partitions, wait_for_broker
from schemas import topics
from schemas.errors import ConfigError, TransportError
from schemas.settings import KafkaSettings


@pytest.mark.broker
def test_creating_twice_changes_nothing(log: KafkaSettings) -> None:
    create_topics(log)
    assert number_of_partitions(log, topics.CONTROL) == 1
    assert number_of_partitions(log, topics.SEGMENTS) == log.partitions


@pytest.mark.broker
def test_other_partitions_at_the_broker_are_a_configuration_error(log: KafkaSettings) -> None:
    with pytest.raises(ConfigError, match="partitions"):
        create_topics(log.model_copy(update={"partitions": log.partitions + 1}))


@pytest.mark.broker
def test_a_topic_that_would_delete_the_log_is_a_configuration_error(kafka: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka})
    for created in admin.create_topics(
        [NewTopic("shortlived.control.v1", 1, 1, config={"retention.ms": "60000"})]
    ).values():
        created.result(20)
    with pytest.raises(ConfigError, match=r"retention\.ms"):
        create_topics(KafkaSettings(bootstrap_servers=kafka, topic_prefix="shortlived"))


@pytest.mark.broker
def test_a_topic_without_room_for_a_batch_of_many_groups_is_a_configuration_error(kafka: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka})
    config = {**topics.RETENTION, "max.message.bytes": "1048588"}
    for created in admin.create_topics([NewTopic("small.control.v1", 1, 1, config=config)]).values():
        created.result(20)
    with pytest.raises(ConfigError, match=r"max\.message\.bytes=1048588"):
        create_topics(KafkaSettings(bootstrap_servers=kafka, topic_prefix="small"))


@pytest.mark.broker
def test_a_record_of_several_megabytes_is_taken_and_comes_back(log: KafkaSettings) -> None:
    producer = AckProducer(log, "test")
    producer.send_raw(topics.CONTROL, b"r", b"x" * (topics.MAX_RECORD_BYTES - 1000)).result()
    producer.close()
    reader = TopicReader(log, [topics.CONTROL])
    assert [len(record.value) for record in reader.read_to_end()] == [topics.MAX_RECORD_BYTES - 1000]
    reader.close()


def test_an_absent_broker_is_one_clear_error() -> None:
    with pytest.raises(TransportError, match=r"127\.0\.0\.1:1"):
        wait_for_broker(KafkaSettings(bootstrap_servers="127.0.0.1:1"), 0.3)


@pytest.mark.broker
def test_a_broker_says_its_settings(log: KafkaSettings) -> None:
    assert int(broker_setting(log, "group.min.session.timeout.ms") or 0) > 0
    assert broker_setting(log, "no.such.setting") is None
