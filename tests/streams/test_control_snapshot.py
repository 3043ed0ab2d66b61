"""Snapshots of the control fold: the same state as the fold from the start, and never a wrong one."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_log import RUN, admitted, completed, configured, folded, logs, published, requested, run_fold
from control_processes import Child, Surroundings
from hypothesis import given, settings
from hypothesis import strategies as st
from test_control_worker import OUTPUTS, Raw, effects_of, records
from test_feeder_processes import refolded, written

from schemas import events as ev
from schemas import topics
from schemas.codec import encode
from schemas.events import Event
from streams.control_fold import fold
from streams.control_output import Written
from streams.control_snapshot import Snapshots
from streams.control_state import ControlState
from streams.control_worker import ControllerWorker


def always(_offset: int, _event_id: str) -> bool:
    return True


def state_after(*events: Event) -> ControlState:
    state = ControlState(RUN)
    run_fold(*events, state=state)
    return state


def test_the_newest_that_fits_is_loaded_and_older_ones_go(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, RUN)
    log: list[Event] = [configured(), *[published(f"v{n}") for n in range(4)]]
    for length in (2, 3, 4):
        snapshots.save(state_after(*log[:length]))
    assert len(list(tmp_path.iterdir())) == 2
    assert Snapshots(tmp_path, RUN).load(always) == state_after(*log[:4])


def test_one_that_is_damaged_of_another_run_or_of_another_log_is_left_alone(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, RUN)
    older, newer = (
        state_after(configured(), published("v0")),
        state_after(configured(), published("v0"), published("v1")),
    )
    snapshots.save(older)
    snapshots.save(newer)
    asked = []

    def is_at(offset: int, event_id: str) -> bool:
        asked.append((offset, event_id))
        return offset == 1

    assert Snapshots(tmp_path, RUN).load(is_at) == older
    assert asked == [(2, published("v1").event_id), (1, published("v0").event_id)]
    newest = max(tmp_path.iterdir())
    newest.write_bytes(newest.read_bytes()[:-1])
    assert Snapshots(tmp_path, RUN).load(always) == older
    assert Snapshots(tmp_path, "other").load(always) == ControlState("other")
    assert Snapshots(tmp_path / "none", RUN).load(always) == ControlState(RUN)


def test_it_is_due_after_so_many_records_and_not_behind_one_that_could_not_be_read(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, RUN, every=2)
    state = ControlState(RUN)
    worker = ControllerWorker(RUN, {t.name: Written(t) for t in OUTPUTS}, set(), state)
    due = []
    for record in [
        *records([configured(), published("v0"), published("v1")]),
        Raw(3, b"junk"),
        Raw(4, b"junk"),
    ]:
        worker.take(record)
        due.append(snapshots.due(state))
        if due[-1]:
            snapshots.save(state)
    assert due == [False, True, False, False, False]


def test_f26_a_snapshot_that_cannot_be_written_leaves_the_older_one_usable(tmp_path: Path) -> None:
    snapshots, older = Snapshots(tmp_path, RUN), state_after(configured())
    snapshots.save(older)
    newer = state_after(configured(), published("v0"))
    (tmp_path / "control-r1-000000000002.new").mkdir()  # in its way
    snapshots.save(newer)
    assert Snapshots(tmp_path, RUN).load(always) == older
    assert not snapshots.due(newer)


def test_f26_a_snapshot_that_is_half_there_or_goes_while_it_is_read_leaves_the_older_one_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Partial load, and a clear at the same time: each says what failed, and the fold begins at what is left."""
    snapshots, older = Snapshots(tmp_path, RUN), state_after(configured())
    snapshots.save(older)
    snapshots.save(state_after(configured(), published("v0")))
    newest = max(tmp_path.iterdir())
    whole = newest.read_bytes()
    for size in (0, 16, 32, len(whole) // 2, len(whole) - 1):
        newest.write_bytes(whole[:size])
        assert Snapshots(tmp_path, RUN).load(always) == older
        assert newest.name in capsys.readouterr().out
    read = Path.read_bytes

    def gone(path: Path) -> bytes:
        path.unlink()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", gone)
    assert Snapshots(tmp_path, RUN).load(always) == ControlState(RUN)
    assert newest.name in capsys.readouterr().out


def test_f26_replacing_a_snapshot_takes_the_old_one_only_when_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = Snapshots(tmp_path, RUN)
    log: list[Event] = [configured(), published("v0"), published("v1")]
    for length in (1, 2):
        snapshots.save(state_after(*log[:length]))
    monkeypatch.setattr("os.fsync", fails)
    snapshots.save(state_after(*log))
    assert Snapshots(tmp_path, RUN).load(always) == state_after(*log[:2])


def fails(_file: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_directory_that_takes_nothing_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    Snapshots(tmp_path / "file", RUN).save(state_after(configured()))
    assert Snapshots(tmp_path / "file", RUN).load(always) == ControlState(RUN)


@settings(max_examples=100, deadline=None)
@given(logs(), st.data())
def test_what_is_skimmed_gives_the_same_state_and_the_rest_the_same_effects(
    log: list[Event], data: st.DataObject
) -> None:
    """Skimmed: from a snapshot or the start up to any place below which every effect is written."""
    whole = effects_of(log)
    whole_state = ControlState(RUN)
    run_fold(*log, state=whole_state)
    cut = data.draw(st.integers(0, len(log)))
    there = [effect for effect in whole if effect.cause_offset < cut]
    written_to = {topic.name: Written(topic) for topic in OUTPUTS}
    for effect in there:
        written_to[topics.TOPIC_OF[type(effect)].name].add(effect)
    worker = ControllerWorker(RUN, written_to, set())
    assert worker.written_below <= cut
    snapshot_at = data.draw(st.integers(0, cut))
    before = ControlState(RUN)
    folded(list(enumerate(log))[:snapshot_at], before)
    worker.state = ControlState.from_bytes(before.to_bytes())
    rest = []
    for record in records(log):
        if worker.state.next_offset <= record.offset < cut:
            assert record.value is not None
            worker.skim(record.offset, record.key, record.value)
        else:
            rest += worker.take(record)
    assert [encode(event) for event in rest] == [encode(e) for e in whole if e.cause_offset >= cut]
    assert worker.state.to_bytes() == whole_state.to_bytes()


def test_a_quiet_fold_makes_no_effects() -> None:
    log = [configured(batch__size=1), requested(1), admitted("a"), completed("a", ["v1"])]
    state = ControlState(RUN)
    assert [fold(state, offset, event, quiet=True) for offset, event in enumerate(log)] == [[], [], [], []]
    assert state.counters == {"admitted": 1, "kept:trained": 1}


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.end()


@pytest.mark.broker
def test_a_controller_goes_on_from_its_snapshot_and_without_one_from_the_start(
    kafka: str, tmp_path: Path, children: list[Child]
) -> None:
    around = Surroundings(
        kafka, tmp_path, uuid.uuid4().hex[:8], prompts=12, batch__size=2, group__size=2,
        feeder__max_outstanding_groups=4,
    )  # fmt: skip
    around.begin()
    feeder, first = Child("streams.feeder", around.file), Child("streams.controller_app", around.file)
    children += [feeder, first]
    around.run_until(lambda: len(around.all(ev.TrainBatch)) >= 2)
    assert first.stop() == 0
    home = around.settings.run_directory / "controller"
    assert list(home.glob("*.snapshot"))
    second = Child("streams.controller_app", around.file)
    children.append(second)
    around.run_until(lambda: len(around.all(ev.TrainBatch)) >= 4)
    second.kill()
    for snapshot in home.glob("*.snapshot"):
        snapshot.unlink()
    around.run_until(lambda: bool(around.all(ev.EndOfBatches)))
    assert second.stop() == 0
    lines = [json.loads(line) for line in second.log.splitlines() if '"folding"' in line]
    assert lines[0]["snapshot"] == 0
    assert lines[-1]["at"] > 0
    assert any(line["snapshot"] > 0 for line in lines)
    effects, _ = refolded(around)
    for topic in OUTPUTS:
        expected = [encode(effect) for effect in effects if topics.TOPIC_OF[type(effect)] is topic]
        assert [encode(effect) for effect in written(around, topic)] == expected
    around.close()
