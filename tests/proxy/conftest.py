"""Fixtures of the proxy tests: topics at the shared broker, and scripted engines."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from proxy_rig import PREFIX
from scripted_engine import ScriptedEngine

from journal.topic_admin import create_topics
from schemas.settings import KafkaSettings


@pytest.fixture(scope="session")
def broker(kafka: str) -> str:
    """Bootstrap servers, with our topics there."""
    create_topics(KafkaSettings(bootstrap_servers=kafka, topic_prefix=PREFIX))
    return kafka


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    scripted = ScriptedEngine()
    await scripted.start()
    yield scripted
    await scripted.stop()


@pytest_asyncio.fixture
async def second_engine() -> AsyncIterator[ScriptedEngine]:
    scripted = ScriptedEngine()
    await scripted.start()
    yield scripted
    await scripted.stop()
