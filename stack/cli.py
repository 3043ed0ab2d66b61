"""`hoofprint`: the command line. Every command is one function of a module beside this one or of `analytics`.

A failure that we know is one sentence on stderr and exit status 2, never a traceback. Heavy libraries are imported by the
command that needs them, so that `hoofprint part` starts fast.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from schemas.errors import ConfigError, HoofprintError
from schemas.settings import load, render_toml
from stack import cli_archive, cli_dead_letters
from stack.release import software_version


class OneSentence(TyperGroup):
    """Turns errors of our tree into one sentence."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except HoofprintError as error:
            typer.echo(f"error: {error.message}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=OneSentence,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The durable trail of every token in asynchronous RL post-training.",
)

Config = Annotated[
    Path | None, typer.Option("--config", help="TOML file; `hoofprint config` prints one with all defaults.")
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=v", help="One setting, above file and environment.")
]


@app.command()
def up(config: Config = None, sets: Sets = None) -> None:
    """Start a run, or go on with it, and keep its processes alive until it is trained or you stop it (Ctrl-C)."""
    from stack.up import up as run_up

    settings = load(config, tuple(sets or ()))
    asyncio.run(run_up(settings, typer.echo, _on_signals))


@app.command()
def demo(
    task: Annotated[str, typer.Option(help="dial or smollm2")] = "dial",
    engine: Annotated[str, typer.Option(help="cpu, or sglang: real SGLang on CPU")] = "cpu",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps; fewer than the preset's: no reward check.")
    ] = None,
    config: Config = None,
    sets: Sets = None,
) -> None:
    """Train a small policy through all parts, report, and check the laws of the design."""
    from stack.demo.run import run_demo

    raise typer.Exit(asyncio.run(run_demo(task, engine, steps, config, tuple(sets or ()), _on_signals)))


@app.command()
def part(
    name: Annotated[
        str, typer.Argument(help="proxy, assembler, controller, feeder, trainer, archiver or rollout")
    ],
    settings: Annotated[Path | None, typer.Option(help="The run's settings.json")] = None,
    config: Config = None,
    sets: Sets = None,
) -> None:
    """Run one process of a run; `hoofprint up` starts all of them so. Exit status 2: wrongly configured."""
    from stack.parts import run_part
    from stack.run_directory import settings_of

    tree = settings_of(settings) if settings is not None else load(config, tuple(sets or ()))
    try:
        status = run_part(name, tree)
    except ConfigError:
        raise
    except HoofprintError as error:
        typer.echo(f"error: {error.message}", err=True)
        status = 1  # may work at the next try
    raise typer.Exit(status)


@app.command()
def prepare(config: Config = None, sets: Sets = None) -> None:
    """Create the topics and publish the run's settings, for a deployment that starts the processes itself."""
    from journal.topic_admin import create_topics, wait_for_broker
    from stack.up import configure_run

    settings = load(config, tuple(sets or ()))
    wait_for_broker(settings.kafka, settings.kafka.publish_timeout_s)
    create_topics(settings.kafka)
    if configure_run(settings, settings, typer.echo) != settings:
        raise ConfigError("the settings are not those that the run began with", run_id=settings.run.run_id)
    typer.echo(f"run {settings.run.run_id} is ready at {settings.kafka.bootstrap_servers}")


@app.command()
def config(config: Config = None, sets: Sets = None) -> None:
    """Print a settings file with every default; with --config or --set: what they result in, as JSON."""
    if config is None and not sets:
        typer.echo(render_toml())
    else:
        typer.echo(load(config, tuple(sets or ())).model_dump_json(indent=2))


@app.command()
def topics() -> None:
    """Print the topics: partitions, key, and the events in each."""
    from schemas.topics import ALL_TOPICS

    for topic in ALL_TOPICS:
        partitions = topic.partitions if topic.partitions is not None else "kafka.partitions"
        typer.echo(f"{topic.name}  key {topic.key}, partitions {partitions}")
        typer.echo(f"    {', '.join(event.__name__ for event in topic.events)}")


@app.command()
def broker(
    data: Annotated[Path, typer.Option(help="Data directory, made if new")] = Path("runs/broker"),
    port: Annotated[int, typer.Option(help="0: the directory's own, or a free one")] = 0,
) -> None:
    """Run the embedded Kafka in the foreground until Ctrl-C."""
    from stack.broker.embedded import EmbeddedKafka

    kafka = EmbeddedKafka(data, port)
    argv = kafka.command()
    typer.echo(f"bootstrap servers: {kafka.bootstrap_servers}")
    sys.stdout.flush()
    os.execv(argv[0], argv)  # noqa: S606 — a list of our own, no shell


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(software_version())


def _on_signals(asked: asyncio.Event) -> None:
    """Called inside the loop: Ctrl-C and SIGTERM ask for an orderly stop; a second Ctrl-C is Python's own again."""
    loop = asyncio.get_running_loop()

    def ask() -> None:
        asked.set()
        loop.remove_signal_handler(signal.SIGINT)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask)


cli_archive.add_to(app)
cli_dead_letters.add_to(app)


if __name__ == "__main__":
    app()
