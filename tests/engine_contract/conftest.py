"""The engine under test: ours in every run, real SGLang with the marker `sglang`. One at a time, and one start for each.

Between tests it is idle, unpaused, and has the untrained Dial policy as version `v0`; `certain` gives it weights that say
token 7 for ever, as version `v7`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from contract_engines import ENGINES, started
from engine_checkpoints import write_always
from engine_client import Client

from stack.engine.launch import EngineProcess
from stack.models.dial import write_dial_checkpoint


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture in {"engine", "moe_engine"}.intersection(metafunc.fixturenames):
        modes = ["deltas"] if metafunc.definition.get_closest_marker("deltas") else ["whole"]
        engines = [
            pytest.param(
                (name, mode),
                id=name,
                marks=[pytest.mark.sglang, pytest.mark.timeout(400)]
                if name == "sglang"
                else [pytest.mark.engine],
            )
            for name in ENGINES
            for mode in modes
        ]
        metafunc.parametrize(fixture, engines, indirect=True, scope="session")


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
def engine(request: pytest.FixtureRequest, dial: Path) -> Iterator[EngineProcess]:
    name, mode = request.param
    with started(name, dial, incremental_streaming_output=mode == "deltas") as process:
        yield process


@pytest.fixture
async def client(engine: EngineProcess, dial: Path) -> AsyncIterator[Client]:
    async with Client(engine.base_url) as client:
        await client.until_idle()
        await client.update(dial, "v0")
        yield client


@pytest.fixture
async def certain(client: Client, always: Callable[[int], Path]) -> Client:
    await client.update(always(7), "v7")
    return client
