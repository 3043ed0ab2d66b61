"""An archived run, put back into Kafka: the live assembler and controller come to the same sequences and verdicts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from synthetic_run import group_name, small_run

from analytics.archived_payloads import ArchivedPayloads
from analytics.archiver import archive_until
from analytics.invariants import check_run
from analytics.replay import compare, replay_into, replay_settings, verify
from analytics.sql import run_query
from analytics.whatif import whatif
from journal.payloads import PayloadStore
from journal.topic_admin import create_topics
from schemas import events as ev
from schemas.arrow import GROUP_PAYLOAD_CODEC
from schemas.errors import ArchiveError, ConfigError, CorruptPayload
from schemas.settings import Settings

ROOT = Path(__file__).parents[2]
WORKER = """
import importlib, sys
from pathlib import Path
from schemas.settings import Settings
sys.exit(importlib.import_module(sys.argv[1]).main(Settings.from_json(Path(sys.argv[2]).read_text())))
"""


def target_of(run_dir: Path, kafka: str, tmp_path: Path, new_id: str = "r2") -> Settings:
    tree = replay_settings(run_dir, new_id).model_dump(mode="json")
    tree["kafka"] |= {"bootstrap_servers": kafka, "topic_prefix": f"{new_id}-{os.getpid()}-{tmp_path.name}"}
    return Settings.model_validate(tree)


JUDGES = ("streams.assembler_app", "streams.controller_app")


@contextmanager
def workers(settings: Settings, names: Sequence[str] = JUDGES) -> Iterator[None]:
    """They are stopped in this order."""
    settings.run_directory.mkdir(parents=True, exist_ok=True)
    file = settings.run_directory / "settings.json"
    file.write_text(settings.to_json())
    create_topics(settings.kafka)
    started = [
        subprocess.Popen([sys.executable, "-c", WORKER, name, file], cwd=ROOT, start_new_session=True)
        for name in names
    ]
    try:
        yield
        for process in started:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
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
@pytest.mark.e2e
def test_a_run_whose_payloads_were_deleted_answers_as_before(kafka: str, tmp_path: Path) -> None:
    """Live workers write the payloads of r2, its archiver deletes those of step 1, of the dropped and of the failed; then
    everything that reads an archive reads this one, and r2 itself is replayed into r3."""
    run_dir = small_run(tmp_path, by_reference=True).write()
    tree = target_of(run_dir, kafka, tmp_path).model_dump(mode="json")
    tree["trainer"]["keep_checkpoints"] = 2
    tree["archive"] |= {"flush_s": 0.2, "collect_every_s": 0.3, "collect_after_s": 0.0}
    target = Settings.model_validate(tree)
    with workers(target, (*JUDGES, "analytics.archiver")):
        assert replay_into(run_dir, target, patience_s=60).ended
        store = PayloadStore(target.payload_url)
        deadline = time.monotonic() + 60
        while len(attempts := places(store)) > 2 and time.monotonic() < deadline:
            time.sleep(0.2)
    assert attempts == {
        "r2-e0-p000002/0",
        "r2-e0-p000004/1",
    }  # of step 2, which the older checkpoint does not cover
    second = target.run_directory
    assert verify(second).ok
    assert [check for check in check_run(second) if not check.ok] == []
    assert run_query(second, "group_fate").num_rows > 0
    assert whatif(second, {"window.keep_versions": [1, 2]}).num_rows == 2
    assert compare(run_dir, second).ok
    third = target_of(second, kafka, tmp_path, "r3")
    with workers(third):
        report = replay_into(second, third, patience_s=60)
    assert (report.missing, report.ended) == ((), True)
    archive_until(third)
    comparison = compare(second, third.run_directory)
    assert comparison.ok, comparison
    assert (comparison.groups, comparison.sequences, comparison.tokens) == (5, 10, 36)
    assert comparison.verdict_changes == ()


def test_a_group_that_its_segments_do_not_give_is_not_made_up(tmp_path: Path) -> None:
    """The hand-written payload has other bytes than the assembler's: without the file, nobody says what was in it."""
    run = small_run(tmp_path)
    run_dir = run.write()
    done = next(event for event in run.events if isinstance(event, ev.GroupCompleted))
    payloads = ArchivedPayloads(run_dir, run.settings)
    assert payloads.sequences(done).num_rows == 2
    forged = msgspec.structs.replace(done.payload, sha256="0" * 64, uri="r/gone/0/" + "0" * 64)
    with pytest.raises(CorruptPayload, match="do not give its bytes"):
        payloads.sequences(msgspec.structs.replace(done, payload=forged))


def places(store: PayloadStore) -> set[str]:
    return {"/".join(one.uri.split("/")[1:3]) for one in store.list("r2")}


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
    store = PayloadStore(run.settings.payload_url)  # type: ignore[attr-defined]
    rows = store.open_arrow(payload).to_pylist()  # type: ignore[arg-type]
    rows[0]["tokens"][0] += 1
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(rows, store.open_arrow(payload).schema)  # type: ignore[arg-type]
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return store.put("r", "forged", 0, sink.getvalue().to_pybytes(), GROUP_PAYLOAD_CODEC)
