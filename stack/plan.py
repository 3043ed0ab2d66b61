"""Which processes a run consists of, and with which addresses: settings go in, filled-in settings and a list of parts come out.

No part is started here. `hoofprint up` and `docker-compose.yml` run the same command lines.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from schemas.errors import TransportError
from schemas.settings import Settings
from stack.broker.embedded import EmbeddedKafka
from stack.broker.ready import await_broker
from stack.checkpoints import initial_checkpoint, maker
from stack.endpoints import PortBook, answers
from stack.run_directory import SETTINGS
from stack.supervisor import Part

BROKER, ENGINE, PROXY, ASSEMBLER, CONTROLLER = "broker", "engine", "proxy", "assembler", "controller"
FEEDER, TRAINER, ARCHIVER, ROLLOUT = "feeder", "trainer", "archiver", "rollout"
CHECKPOINT = "checkpoint"
"""Makes the first weights where there are none, while the broker starts."""

_ENGINES = {"cpu": "stack.engine", "sglang": "stack.sglang.launch"}
"""`engine.server`: both take the same command line and speak the same contract."""
_PROBE_BROKER_S = 5.0
_STOP_S = {BROKER: 20.0, ARCHIVER: 60.0, TRAINER: 30.0}
# Who writes stops before who reads: agents, then the proxy, then the processors, then the archiver, then the broker.
_WAVES = {
    BROKER: 0,
    ARCHIVER: 1,
    CONTROLLER: 2,
    ASSEMBLER: 3,
    ENGINE: 4,
    PROXY: 5,
    TRAINER: 6,
    FEEDER: 6,
    ROLLOUT: 7,
}


ALL = frozenset(_WAVES)
REPLAY = frozenset({BROKER, ASSEMBLER, CONTROLLER, ARCHIVER})
"""What judges a replayed log: nothing generates and nothing trains."""


def resolve(settings: Settings, roles: frozenset[str] = ALL) -> Settings:
    """Absolute paths, fixed addresses, the first weights. ConfigError: no such model, or an address that is taken."""
    directory = Path(settings.run.directory).absolute()
    run_directory = directory / settings.run.run_id
    run_directory.mkdir(parents=True, exist_ok=True)
    book = PortBook(run_directory / "ports.json")
    filled: dict[str, dict[str, object]] = {
        "run": {"directory": str(directory)},
        "proxy": {"port": book.port(PROXY, settings.proxy.port)},
    }
    if not settings.kafka.bootstrap_servers:
        filled["kafka"] = {"bootstrap_servers": _embedded(run_directory).bootstrap_servers}
    if TRAINER in roles:
        filled["engine"] = {"model": str(initial_checkpoint(settings, run_directory))}
    if ENGINE in roles and not settings.proxy.engines:
        filled["proxy"]["engines"] = (f"http://127.0.0.1:{book.port(ENGINE)}",)
    tree = settings.model_dump()
    for section, values in filled.items():
        tree[section].update(values)
    return Settings.model_validate(tree)


def _embedded(run_directory: Path) -> EmbeddedKafka:
    kafka = EmbeddedKafka(run_directory / "broker")
    kafka.command()  # settles the port
    return kafka


def parts_of(settings: Settings, roles: frozenset[str] = ALL) -> list[Part]:
    """The parts of a resolved run in the order of their start. A broker or engine of somebody else is left out by `roles`."""
    log = (BROKER,) if BROKER in roles else ()
    weights: tuple[str, ...] = ()
    parts: list[Part] = [_broker(settings)]
    if TRAINER in roles and not Path(settings.engine.model).is_dir():
        weights = (CHECKPOINT,)
        parts.append(_checkpoint(settings))
    if ENGINE in roles:
        parts.append(_engine(settings, weights))
    proxy = f"http://127.0.0.1:{settings.proxy.port}/readyz"
    parts.append(_part(settings, PROXY, after=log, ready=answers(proxy)))
    parts += [_part(settings, name, after=log) for name in (CONTROLLER, ARCHIVER)]
    parts += _several(settings, ASSEMBLER, settings.assembler.workers, log)
    parts.append(_part(settings, TRAINER, after=log + weights, finite=True))
    parts += _several(settings, ROLLOUT, settings.rollout.workers, log)
    parts.append(_part(settings, FEEDER, after=log, finite=True))
    return [part for part in parts if part.name.split("-")[0] in roles | {CHECKPOINT}]


def _several(settings: Settings, name: str, count: int, after: tuple[str, ...]) -> list[Part]:
    names = [name] if count == 1 else [f"{name}-{i}" for i in range(count)]
    return [_part(settings, name, called=called, after=after) for called in names]


def _part(
    settings: Settings,
    name: str,
    *,
    after: tuple[str, ...],
    called: str | None = None,
    ready: Callable[[], Awaitable[bool]] | None = None,
    finite: bool = False,
) -> Part:
    file = settings.run_directory / SETTINGS
    return Part(
        called or name,
        (sys.executable, "-m", "stack.cli", "part", name, "--settings", str(file)),
        after=after,
        ready=ready,
        finite=finite,
        wave=_WAVES[name],
        stop_s=_STOP_S.get(name, 10.0),
        environ=_threads(settings.trainer.threads if name == TRAINER else 1),
    )


def _broker(settings: Settings) -> Part:
    port = settings.kafka.bootstrap_servers.rpartition(":")[2]
    data = settings.run_directory / "broker"
    argv = (sys.executable, "-m", "stack.broker", "--data", str(data), "--port", port)
    return Part(
        BROKER,
        argv,
        ready=_broker_is_ready(settings.kafka.bootstrap_servers),
        wave=_WAVES[BROKER],
        stop_s=_STOP_S[BROKER],
    )


def _checkpoint(settings: Settings) -> Part:
    path = Path(settings.engine.model)

    async def is_there() -> bool:
        return await asyncio.to_thread(path.is_dir)

    argv = maker(path, settings.run.seed)
    return Part(CHECKPOINT, argv, ready=is_there, finite=True, wave=_WAVES[ENGINE], environ=_threads(1))


def _engine(settings: Settings, after: tuple[str, ...]) -> Part:
    engine, url = settings.engine, settings.proxy.engines[0]
    argv = [sys.executable, "-m", _ENGINES[engine.server], "--model-path", engine.model]
    argv += ["--port", url.rpartition(":")[2], "--random-seed", str(settings.run.seed)]
    argv += ["--threads", str(engine.threads), "--max-running", str(engine.max_running)]
    if engine.server == "cpu":
        argv += ["--min-step-ms", str(engine.min_step_ms)]
    if engine.context_length:
        argv += ["--context-length", str(engine.context_length)]
    health, threads = answers(f"{url}/health"), _threads(engine.threads)
    return Part(ENGINE, tuple(argv), after=after, ready=health, wave=_WAVES[ENGINE], environ=threads)


def _threads(count: int) -> dict[str, str]:
    """Numerical libraries take every core they see, in every process, if nobody says otherwise."""
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count), "TOKENIZERS_PARALLELISM": "false"}


def _broker_is_ready(bootstrap_servers: str) -> Callable[[], Awaitable[bool]]:
    async def probe() -> bool:
        try:
            await asyncio.to_thread(await_broker, bootstrap_servers, _PROBE_BROKER_S)
        except TransportError:
            return False
        return True

    return probe
