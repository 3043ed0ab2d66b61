"""Payload files go when nothing needs them, the archive keeps what only they held, and a kill in the middle changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_run import group_name, small_run, write_archive

from analytics.archived_payloads import ArchivedPayloads, archive_store
from analytics.columns import RawRow
from analytics.payload_collector import PayloadCollector
from analytics.retention import ORPHAN_AGE_US
from analytics.tables import Archive
from journal.payloads import PayloadStore
from schemas import events as ev
from schemas.errors import StoreError, TransportError
from schemas.events import PayloadRef
from schemas.settings import Settings

ROOT = Path(__file__).parents[2]
HOUR_US = 3600 * 1_000_000


def collecting(settings: Settings, **changes: object) -> Settings:
    tree = settings.model_dump(mode="json")
    tree["trainer"]["keep_checkpoints"] = 2  # of steps 1 and 2: what both cover is step 1
    tree["archive"] |= {"collect_after_s": 0.0, **changes}
    return Settings.model_validate(tree)


def collector(settings: Settings, later_us: int = 0, catch_up: object = lambda: None) -> PayloadCollector:
    archive, store = Archive(settings.run_directory, create=True), PayloadStore(settings.payload_url)
    newest = max((one.modified_at for one in store.list(settings.run.run_id)), default=0)
    assert callable(catch_up)
    return PayloadCollector(settings, archive, store, catch_up, lambda: newest + later_us)


def places(store: PayloadStore) -> set[str]:
    return {"/".join(one.uri.split("/")[1:3]) for one in store.list("r")}


def all_refs(events: list[ev.Event]) -> list[PayloadRef]:
    names = ("tokens_ref", "request_ref", "experts")
    refs = [getattr(one, name) for one in events if isinstance(one, ev.TokenSegment) for name in names]
    return [ref for ref in refs if ref is not None]


def test_what_is_dropped_or_covered_goes_and_the_rest_stays(tmp_path: Path) -> None:
    """Step 1 had g0 and g1, step 2 g2 and g4's second attempt; g3 is stale, g4's first attempt failed."""
    run = small_run(tmp_path, by_reference=True)
    run.write()
    settings = collecting(run.settings)
    store = PayloadStore(settings.payload_url)
    before = {one.uri for one in store.list("r")}
    made = collector(settings)
    assert made.collect() > 0
    assert places(store) == {f"{group_name(2)}/0", f"{group_name(4)}/1"}
    gone = before - {one.uri for one in store.list("r")}
    assert sum(made.files.values()) == len(gone)
    assert set(made.files) == {"dropped", "trained"}
    assert made.collect() == 0
    assert not (Path(settings.payload_url) / "r" / group_name(0)).exists()  # no empty directories are left


def test_what_cannot_be_made_again_is_kept_in_the_archive(tmp_path: Path) -> None:
    run = small_run(tmp_path, by_reference=True)
    run_dir = run.write()
    live = PayloadStore(run.settings.payload_url)
    before = {ref.uri: live.get(ref) for ref in all_refs(run.events)}
    collector(collecting(run.settings)).collect()
    payloads = ArchivedPayloads(run_dir, run.settings)
    assert {ref.uri: payloads.get(ref) for ref in all_refs(run.events)} == before
    kept = {one.uri for one in archive_store(run_dir).list("r")}
    assert kept == before.keys() - {one.uri for one in live.list("r")}


def test_young_files_stay_for_as_long_as_was_set(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    run.write()
    settings = collecting(run.settings, collect_after_s=3600.0)
    assert collector(settings, HOUR_US - 10_000_000).collect() == 0
    assert collector(settings, HOUR_US).collect() > 0


def test_a_file_that_no_event_names_goes_after_a_day_and_is_not_kept(tmp_path: Path) -> None:
    """Written by an assembler that died before it sent `GroupCompleted`, in an attempt that is open; and a torn one."""
    run = small_run(tmp_path)
    store = PayloadStore(run.settings.payload_url)
    orphan = store.put("r", group_name(9), 0, b"never sent", "c")
    torn = Path(run.settings.payload_url) / "r" / group_name(9) / "0" / ".digest.1.1.tmp"
    torn.write_bytes(b"half")
    write_archive(run.run_dir, [event for event in run.events if isinstance(event, ev.RunConfigured)])
    settings = collecting(run.settings)
    collector(settings, ORPHAN_AGE_US - 60_000_000).collect()
    assert store.get(orphan) == b"never sent"
    made = collector(settings, ORPHAN_AGE_US + 1)
    made.collect()
    assert not Path(run.settings.payload_url, orphan.uri).exists()
    assert not torn.exists()
    assert made.files["unreferenced"] >= 2
    assert list(archive_store(run.run_dir).list("r")) == []


def test_a_session_of_no_group_keeps_its_files_as_long_as_it_can_be_taken_up(tmp_path: Path) -> None:
    run = small_run(tmp_path, by_reference=True)
    mine = [event for event in run.events if isinstance(event, ev.RunConfigured | ev.TokenSegment)]
    write_archive(run.run_dir, mine)  # as the archive of a run whose groups nobody admitted
    settings = collecting(run.settings)
    assert collector(settings, int(settings.proxy.session_max_age_s * 1_000_000) - 60_000_000).collect() == 0
    made = collector(settings, int(settings.proxy.session_max_age_s * 1_000_000) + 1)
    made.collect()
    assert made.files["no_group"] == len({ref.uri for ref in all_refs(run.events)})


def test_it_deletes_only_what_the_archive_has_caught_up_with(tmp_path: Path) -> None:
    """The verdict is known, and the segments behind it are not archived yet: the broker is away, so nothing goes."""
    run = small_run(tmp_path)
    run.write()

    def away() -> None:
        raise TransportError("the broker sends nothing")

    made = collector(collecting(run.settings), catch_up=away)
    assert (made.collect(), made.failures) == (0, 1)
    assert len(places(PayloadStore(run.settings.payload_url))) == 5


def test_a_file_with_other_bytes_stays_as_evidence(tmp_path: Path) -> None:
    run = small_run(tmp_path, by_reference=True)
    run.write()
    dropped = next(
        ref for ref in all_refs(run.events) if group_name(3) in ref.uri and ref.codec.startswith("segment")
    )
    damaged = Path(run.settings.payload_url) / dropped.uri
    damaged.write_bytes(b"x" * dropped.size)
    made = collector(collecting(run.settings))
    made.collect()
    assert made.failures == 1
    assert damaged.exists()


def test_the_archive_is_looked_through_once_and_what_is_archived_later_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(tmp_path, by_reference=True)
    everything: list[ev.Event] = [*run.events, *run.effects()]
    late = [event for event in everything if getattr(event, "group_id", None) == group_name(3)]
    write_archive(run.run_dir, [event for event in everything if event not in late])
    made = collector(collecting(run.settings))
    assert made.collect() > 0
    before = places(PayloadStore(run.settings.payload_url))
    assert f"{group_name(3)}/0" in before

    def again(_archive: Archive, payloads: object) -> dict[str, str]:
        assert list(payloads) == []  # type: ignore[call-overload]
        return {}

    monkeypatch.setattr("analytics.payload_collector.references", again)
    for offset, event in enumerate(late):
        made.told(RawRow(0, offset, 0, None, b"", event))
    assert made.collect() > 0
    assert places(PayloadStore(run.settings.payload_url)) == before - {f"{group_name(3)}/0"}
    assert made.collect() == 0


KILLED = """
import os, signal, sys
from pathlib import Path
from analytics.payload_collector import PayloadCollector
from analytics.tables import Archive
from journal.payloads import PayloadStore
from schemas.settings import Settings

settings = Settings.from_json(Path(sys.argv[1]).read_text())
store, left, before = PayloadStore(settings.payload_url), [int(sys.argv[2])], sys.argv[3] == "before"
delete = store.delete

def dying(uri):
    if left[0] == 0 and before:
        os.kill(os.getpid(), signal.SIGKILL)
    delete(uri)
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1

store.delete = dying
PayloadCollector(settings, Archive(settings.run_directory, create=True), store, lambda: None).collect()
"""


@pytest.mark.parametrize(("deletes", "when"), [(0, "before"), (3, "after"), (5, "before")])
def test_killed_in_the_middle_the_next_pass_finishes_and_nothing_is_lost(
    tmp_path: Path, deletes: int, when: str
) -> None:
    run = small_run(tmp_path, by_reference=True)
    run_dir = run.write()
    settings = collecting(run.settings)
    live = PayloadStore(settings.payload_url)
    before = {ref.uri: live.get(ref) for ref in all_refs(run.events)}
    file = tmp_path / "settings.json"
    file.write_text(settings.to_json())
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, file, str(deletes), when], cwd=ROOT, check=False, env=dict(os.environ)
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(places(live)) > 2
    collector(settings).collect()
    assert places(live) == {f"{group_name(2)}/0", f"{group_name(4)}/1"}
    payloads = ArchivedPayloads(run_dir, settings)
    assert {ref.uri: payloads.get(ref) for ref in all_refs(run.events)} == before


def test_a_payload_that_is_nowhere_is_an_error(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    run_dir = run.write()
    with pytest.raises(StoreError):
        ArchivedPayloads(run_dir, run.settings).get(PayloadRef("r/g/0/none", "none", 1, "c"))


def test_settings_of_a_run_carry_the_rule(tmp_path: Path) -> None:
    kept = json.loads(Settings().to_json())["archive"]
    assert (kept["collect"], kept["collect_after_s"]) == (True, 3600.0)
