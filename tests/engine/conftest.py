"""Checkpoints and running engines for the engine's tests.

`dial` is the untrained Dial policy; `always` gives checkpoints that are certain of one token.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from engine_checkpoints import write_always
from engine_client import Client

from stack.engine.launch import EngineProcess
from stack.models.dial import write_dial_checkpoint


@pytest.fixture(scope="session")
def dial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dial_checkpoint(tmp_path_factory.mktemp("dial") / "seed0", seed=0)


@pytest.fixture(scope="session")
def always(tmp_path_factory: pytest.TempPathFactory, dial: Path) -> Callable[[int], Path]:
    root = tmp_path_factory.mktemp("always")

    def write(token: int) -> Path:
        directory = root / str(token)
        return directory if directory.is_dir() else write_always(directory, dial, token)

    return write


@pytest.fixture(scope="session")
def word_model(tmp_path_factory: pytest.TempPathFactory, dial: Path) -> Path:
    """The Dial policy with a tokenizer of 32 words, `w0` to `w31`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    directory = tmp_path_factory.mktemp("words")
    for file in dial.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def engine(dial: Path) -> Iterator[EngineProcess]:
    """An engine that decodes as fast as it can."""
    with EngineProcess(dial, weight_version="v0") as process:
        yield process


@pytest.fixture(scope="session")
def slow_engine(always: Callable[[int], Path]) -> Iterator[EngineProcess]:
    """An engine whose steps take 10 ms: requests of some hundred tokens can be met in the middle."""
    with EngineProcess(
        always(7), weight_version="v7", min_step_ms=10, incremental_streaming_output=True
    ) as process:
        yield process


@pytest.fixture
async def client(engine: EngineProcess) -> AsyncIterator[Client]:
    async with Client(engine.base_url) as client:
        yield client


@pytest.fixture
async def slow(slow_engine: EngineProcess, always: Callable[[int], Path]) -> AsyncIterator[Client]:
    """A client of the slow engine, which is idle, unpaused and certain of token 7 again."""
    async with Client(slow_engine.base_url) as client:
        await client.post("/abort_request", {"abort_all": True})
        await client.post("/continue_generation", {})
        await client.post("/update_weights_from_disk", {"model_path": str(always(7)), "weight_version": "v7"})
        yield client
