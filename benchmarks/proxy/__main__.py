"""All figures of the proxy: the process of production, a real broker, an engine of fixed speed; SGLang's router beside it.

`python -m benchmarks.proxy [turns latency streams memory pauses]` runs some of it. CPU-ms are the proxy's whole process, all
threads; what an engine, the broker and the client spend is theirs. The note says how loaded the machine was.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import uvloop

from benchmarks.figures import Figure, publish
from benchmarks.proxy import latency, memory, pauses, streams, turns
from benchmarks.proxy.router import running_router
from benchmarks.proxy.stage import Stage
from stack.broker.embedded import EmbeddedKafka

PACE_MS = 5.0
"""An engine's time per token, where its speed matters."""
FAST_MS = 0.5


class Bench:
    """A broker, a scratch directory, and the figures so far."""

    def __init__(self, broker: EmbeddedKafka, scratch: Path) -> None:
        self._broker, self._scratch = broker, scratch
        self.figures: list[Figure] = []
        self.notes: list[str] = []

    def _stage(self, name: str, token_ms: float, *sets: str, incremental: bool = False) -> Stage:
        return Stage(
            self._broker.bootstrap_servers,
            self._scratch / name,
            token_ms=token_ms,
            incremental=incremental,
            sets=sets,
        )

    def _add(
        self, figure: str, unit: str, ours: float, goal: str | None = None, reference: float | None = None
    ) -> None:
        rounded = None if reference is None else round(reference, 3)
        self.figures.append(Figure(figure, unit, round(ours, 3), goal, rounded))

    def turns(self) -> None:
        """One turn, twenty, fifty."""
        with self._stage("turns", FAST_MS) as stage:
            router = None
            with running_router(stage, self._scratch / "router.log") as found:
                if isinstance(found, str):
                    self.notes.append(found)
                else:
                    router = uvloop.run(found.cost(stage, 512, stream=False))
            for api in turns.APIS:
                (one,) = uvloop.run(turns.cost(stage, api, 1, 512, rounds=20))
                peer = router if api == "native" else None
                self._add(f"{api}, 1 turn of 512 tokens", "CPU-ms/request", one, "<= 2.0", peer)
                (twenty,) = uvloop.run(turns.cost(stage, api, 20, 256, rounds=2))
                self._add(f"{api}, 20 turns of 256", "CPU-ms/request", twenty, "<= 2.5")
                fifty = uvloop.run(turns.cost(stage, api, 50, 128, rounds=6, steps=5))
                self._add(f"{api}, 50 turns of 128", "CPU-ms/request", sum(fifty) / len(fifty), "<= 2.5")
                growth = fifty[-1] / fifty[0]
                self._add(f"{api}, last ten of 50 turns over the first ten", "ratio", growth, "<= 1.3")

    def latency(self) -> None:
        """One request at a time."""
        with (
            self._stage("latency", 0) as stage,
            running_router(stage, self._scratch / "router.log") as router,
        ):
            added = uvloop.run(latency.measure(stage, None if isinstance(router, str) else router.url))
        self._add("added latency, with the log's acknowledgement", "ms", added.with_log, "<= 3", added.peer)
        self._add("added latency, without it", "ms", added.without, "<= 1.0", added.peer)
        self.notes.append(f"the direct call takes {added.direct:.2f} ms")

    def streams(self) -> None:
        """Both modes of an engine."""
        for incremental in (True, False):
            mode = "incremental" if incremental else "cumulative"
            with self._stage(mode, PACE_MS, incremental=incremental) as stage:
                with running_router(stage, self._scratch / "router.log") as found:
                    router = (
                        None if isinstance(found, str) else uvloop.run(found.cost(stage, 256, stream=True))
                    )
                for api in turns.APIS:
                    cost = uvloop.run(streams.measure(stage, api))
                    name = f"{api} stream, {mode} engine"
                    self._add(f"{name}, behind the engine's first token", "ms", cost.lag_ms, "<= 5")
                    self._add(f"{name}, 256 tokens", "CPU-ms/request", cost.cpu_ms, "<= 8", router)

        sets = ("proxy.engine_stream_interval_streamed=1", "proxy.stream_frame_s=0")
        with self._stage("each", PACE_MS, *sets, incremental=True) as stage:
            for api in turns.APIS:
                cost = uvloop.run(streams.measure(stage, api))
                self._add(f"{api} stream, a frame for every token", "CPU-ms/request", cost.cpu_ms)

    def memory(self) -> None:
        """Open and ended sessions."""
        for api in turns.APIS:
            with self._stage(f"memory-{api}", 0) as stage:
                kept = uvloop.run(memory.measure(stage, api))
            self._add(f"{api}, kept of open sessions", "KB/1,000 tokens", kept.open_kb, "<= 12")
            self._add(f"{api}, kept of ended sessions", "KB/1,000 tokens", kept.ended_kb, "<= 1")

    def pauses(self) -> None:
        """64 requests, eight times."""
        with self._stage("pauses", PACE_MS) as stage:
            cost = uvloop.run(pauses.measure(stage))
        self._add("64 requests paused and resumed 8 times: tokens lost", "tokens", cost.lost, "== 0")
        self._add("… tokens twice", "tokens", cost.twice, "== 0")
        self._add("… all running again", "s", cost.again_s, "<= 0.15")
        self._add("… a pause", "CPU-ms", cost.cpu_ms, "<= 200")
        self.notes.append(f"{cost.preemptions} preemptions")


PARTS = (Bench.turns, Bench.latency, Bench.streams, Bench.memory, Bench.pauses)


def main(chosen: list[str]) -> None:
    """All parts, or those that are named."""
    load = f"load average at the start {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    with tempfile.TemporaryDirectory() as scratch, EmbeddedKafka() as broker:
        bench = Bench(broker, Path(scratch))
        for part in PARTS:
            if not chosen or part.__name__ in chosen:
                part(bench)
                print(f"{part.__name__}: done", file=sys.stderr, flush=True)
    notes = [load, *bench.notes, f"at the end {os.getloadavg()[0]:.1f}"]
    publish("proxy", bench.figures, note="; ".join(notes))


if __name__ == "__main__":
    main(sys.argv[1:])
