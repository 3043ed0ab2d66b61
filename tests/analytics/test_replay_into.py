"""An archived run, put back into Kafka: the live assembler and controller come to the same sequences and verdicts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from synthetic_run import group_name, small_run

from analytics.archiver import archive_until
from analytics.invariants import check_run
from analytics.replay import compare, replay_into, replay_settings, verify
from journal.topic_admin import create_topics
from schemas.arrow import GROUP_PAYLOAD_CODEC
from schemas.errors import ArchiveError, ConfigError
from schemas.settings import Settings

ROOT = Path(__file__).parents[2]
WORKER = """
import importlib, sys
from pathlib import Path
from schemas.settings import Settings
sys.exit(importlib.import_module(sys.argv[1]).main(Settings.from_json(Path(sys.argv[2]).read_text())))
"""


def target_of(run_dir: Path, kafka: str, tmp_path: Path) -> Settings:
    tree = replay_settings(run_dir, "r2").model_dump(mode="json")
    tree["kafka"] |= {"bootstrap_servers": kafka, "topic_prefix": f"replay-{os.getpid()}-{tmp_path.name}"}
    return Settings.model_validate(tree)


@contextmanager
def workers(settings: Settings) -> Iterator[None]:
    settings.run_directory.mkdir(parents=True, exist_ok=True)
    file = settings.run_directory / "settings.json"
    file.write_text(settings.to_json())
    create_topics(settings.kafka)
    started = [
        subprocess.Popen([sys.executable, "-c", WORKER, name, file], cwd=ROOT, start_new_session=True)
        for name in ("streams.assembler_app", "streams.controller_app")
    ]
    try:
        yield
        for process in started:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(30) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
            process.wait(30)


@pytest.mark.broker
@pytest.mark.e2e
def test_live_workers_come_to_the_same_sequences_and_verdicts(kafka: str, tmp_path: Path) -> None:
    run_dir = small_run(tmp_path).write()
    target = target_of(run_dir, kafka, tmp_path)
    with workers(target):
        report = replay_into(run_dir, target, patience_s=60)
    assert (report.missing, report.ended, report.results) == ((), True, 6)
    archive_until(target)
    comparison = compare(run_dir, target.run_directory)
    assert comparison.ok, comparison
    assert (comparison.groups, comparison.sequences, comparison.tokens) == (5, 10, 36)
    assert comparison.verdict_changes == ()
    assert verify(target.run_directory).ok
    assert [check.name for check in check_run(target.run_directory) if not check.ok] == []


@pytest.mark.broker
def test_without_live_workers_it_says_so(kafka: str, tmp_path: Path) -> None:
    run_dir = small_run(tmp_path).write()
    with pytest.raises(ArchiveError, match="no live assembler answers"):
        replay_into(run_dir, target_of(run_dir, kafka, tmp_path), patience_s=0.5)


def test_a_replay_needs_an_id_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run id of its own"):
        replay_settings(small_run(tmp_path).write(), "r")


def test_another_token_or_verdict_is_reported(tmp_path: Path) -> None:
    first, second = small_run(tmp_path / "a"), small_run(tmp_path / "b")
    same = compare(first.write(), second.write())
    assert same.ok
    assert same.verdict_changes == ()
    forged = small_run(tmp_path / "c")
    at = next(i for i, e in enumerate(forged.events) if getattr(e, "payload", None) is not None)
    done = forged.events[at]
    forged.events[at] = msgspec.structs.replace(done, payload=forged_payload(forged, done.payload))  # type: ignore[attr-defined]
    effects = forged.effects()
    effects = [
        msgspec.structs.replace(e, reason="other") if getattr(e, "reason", "") == "stale" else e
        for e in effects
    ]
    found = compare(tmp_path / "a" / "r", forged.write(effects))
    assert not found.ok
    assert found.different == ((group_name(0).removeprefix("r-"), 0, "tokens"),)
    assert [(c.before, c.after) for c in found.verdict_changes] == [("dropped(stale)", "dropped(other)")]


def forged_payload(run: object, payload: object) -> object:
    from journal.payloads import PayloadStore

    store = PayloadStore(run.settings.payload_url)  # type: ignore[attr-defined]
    rows = store.open_arrow(payload).to_pylist()  # type: ignore[arg-type]
    rows[0]["tokens"][0] += 1
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(rows, store.open_arrow(payload).schema)  # type: ignore[arg-type]
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return store.put("r", "forged", 0, sink.getvalue().to_pybytes(), GROUP_PAYLOAD_CODEC)
