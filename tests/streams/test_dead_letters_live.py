"""A record that could not be used, put back while the assembler runs: `hoofprint dead-letters` from end to end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from assembler_sessions import RUN, Session
from crash_run import CrashRun
from typer.testing import CliRunner

from journal.clock import system_clock
from journal.dead_letters import dead_letters
from journal.payloads import PayloadStore
from schemas import events as ev
from schemas.arrow import SEGMENT_COLUMNS, SEGMENT_COLUMNS_CODEC
from stack.cli import app
from stack.run_directory import write_settings

pytestmark = pytest.mark.broker


@pytest.fixture
def run(kafka: str, tmp_path: Path) -> Iterator[CrashRun]:
    run = CrashRun(kafka, tmp_path, "group.size=2", "batch.size=1")
    run.settings.run_directory.mkdir(exist_ok=True)
    write_settings(run.settings)
    yield run
    run.close()


def large(run: CrashRun, session: Session) -> tuple[ev.TokenSegment, Path, bytes]:
    """A segment whose columns lie in the store; their file, and its bytes."""
    segment = session.segment(0, [1], [2, 3])
    sink = pa.BufferOutputStream()
    columns = {name: [getattr(segment, name)] for name in SEGMENT_COLUMNS.names}
    with pa.ipc.new_file(sink, SEGMENT_COLUMNS) as writer:
        writer.write_table(pa.table(columns, schema=SEGMENT_COLUMNS))
    raw = sink.getvalue().to_pybytes()
    ref = PayloadStore(run.settings.payload_url).put(RUN, "g0", 0, raw, SEGMENT_COLUMNS_CODEC)
    stored = msgspec.structs.replace(
        segment, context_ids=b"", output_ids=b"", output_logprobs=b"", tokens_ref=ref
    )
    return stored, Path(run.settings.payload_url) / ref.uri, raw


def hoofprint(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["dead-letters", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_letter_is_put_back_when_its_cause_is_mended_and_the_group_completes(run: CrashRun) -> None:
    """The file of a large segment is missing when the assembler wants it, and comes back later."""
    run.start("assembler", "assembler")
    run.start("controller", "controller")
    at = system_clock()
    first, second = Session("g0", 0, at=at), Session("g0", 1, at=at)
    segment, file, raw = large(run, first)
    file.unlink()
    run.producer.publish(ev.identified(_admitted()))
    for event in (segment, first.end(1), *second.whole()):
        run.producer.publish(event)
    run.until(lambda: bool(dead_letters(run.settings.kafka, RUN)), "no dead letter")
    where = str(run.settings.run_directory)
    assert "is gone" in hoofprint("list", where)
    assert run.completed() == 0
    file.write_bytes(raw)
    assert "1 put back" in hoofprint("requeue", where, "--topic", "rollout.segments.v1")
    run.until(lambda: bool(run.batched()), "the group does not complete")
    assert run.batched() == ["g0"]
    assert "0 put back" in hoofprint("requeue", where)
    assert [one.requeued for one in dead_letters(run.settings.kafka, RUN)] == [True]


def _admitted() -> ev.GroupAdmitted:
    return ev.GroupAdmitted(
        run_id=RUN, occurred_at=1, group_id="g0", attempt=0, group_size=2, prompt_index=0, dataset_epoch=0, prompt_digest="d"
    )  # fmt: skip
