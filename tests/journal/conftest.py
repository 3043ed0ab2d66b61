"""A broker of its own topics for each test."""

from __future__ import annotations

import uuid

import pytest

from journal.topic_admin import create_topics
from schemas.settings import KafkaSettings


@pytest.fixture
def log(kafka: str) -> KafkaSettings:
    """Settings of fresh topics at the session's broker."""
    settings = KafkaSettings(bootstrap_servers=kafka, topic_prefix=uuid.uuid4().hex[:8], publish_timeout_s=10)
    create_topics(settings)
    return settings
