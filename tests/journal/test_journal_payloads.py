"""The payload store: content-addressed, whole or absent, checked."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from journal.payloads import PayloadStore
from schemas.errors import CorruptPayload, StoreError
from schemas.events import PayloadRef


@contextmanager
def small_disk() -> Iterator[None]:
    """Files of at most 1,000 bytes: the write fails in its middle, as on a full disk.

    Not a fixture: pytest's own output may be a file, too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


@pytest.mark.parametrize("fsync", [False, True])
def test_the_bytes_come_back_from_the_place_that_their_digest_names(tmp_path: Path, fsync: bool) -> None:
    store = PayloadStore(str(tmp_path), fsync=fsync)
    ref = store.put("run", "group", 1, b"payload", "codec")
    digest = hashlib.sha256(b"payload").hexdigest()
    assert ref == PayloadRef(f"run/group/1/{digest}", digest, 7, "codec")
    assert store.get(ref) == b"payload"
    assert files(tmp_path) == [ref.uri]


def test_putting_again_is_harmless_and_heals_a_broken_file(tmp_path: Path) -> None:
    store = PayloadStore(str(tmp_path))
    ref = store.put("run", "group", 0, b"payload", "codec")
    (tmp_path / ref.uri).write_bytes(b"torn!!!")
    assert store.put("run", "group", 0, b"payload", "codec") == ref
    assert store.get(ref) == b"payload"


def test_other_bytes_are_a_corrupt_payload(tmp_path: Path) -> None:
    store = PayloadStore(str(tmp_path))
    ref = store.put("run", "group", 0, b"payload", "codec")
    (tmp_path / ref.uri).write_bytes(b"another")
    with pytest.raises(CorruptPayload):
        store.get(ref)
    (tmp_path / ref.uri).write_bytes(b"short")
    with pytest.raises(CorruptPayload):
        store.open_arrow(ref)


def test_a_full_disk_is_a_store_error_and_leaves_nothing(tmp_path: Path) -> None:
    store = PayloadStore(str(tmp_path))
    with small_disk():
        with pytest.raises(StoreError):
            store.put("run", "group", 0, b"x" * 5000, "codec")
        assert files(tmp_path) == []
        assert store.put("run", "group", 0, b"x" * 500, "codec").size == 500


def test_a_missing_payload_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        PayloadStore(str(tmp_path)).get(PayloadRef("run/group/0/none", "none", 0, "codec"))


@pytest.mark.parametrize("name", ["..", "a/../../b", "/etc", "."])
def test_no_name_leads_out_of_the_store(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    ref = PayloadStore(str(root)).put(name, name, 0, b"payload", "codec")
    assert files(tmp_path) == [f"root/{ref.uri}"]
    assert len(Path(ref.uri).parts) == 4


def test_a_reference_that_leads_out_of_the_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptPayload):
        PayloadStore(str(tmp_path / "root")).get(PayloadRef("../secret", "0", 0, "codec"))


@pytest.mark.parametrize("url", ["{tmp}/store", "file://{tmp}/store", "memory://store"])
def test_an_arrow_file_opens_as_the_table_that_was_written(tmp_path: Path, url: str) -> None:
    store = PayloadStore(url.format(tmp=tmp_path))
    table = pa.table({"tokens": pa.array([[1, 2], [3]], pa.list_(pa.int32()))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    ref = store.put("run", "group", 0, memoryview(sink.getvalue()), "arrow")
    assert store.open_arrow(ref) == table
    assert [(p.uri, p.size) for p in store.list("run")] == [(ref.uri, ref.size)]


def test_list_and_delete(tmp_path: Path) -> None:
    store = PayloadStore(str(tmp_path))
    one, two = (store.put("run", "group", 0, data, "codec") for data in (b"one", b"two"))
    store.put("other", "group", 0, b"x", "codec")
    store.delete(one.uri)
    store.delete(one.uri)
    assert [p.uri for p in store.list("run")] == [two.uri]
    assert list(store.list("nobody")) == []


def test_empty_directories_go_with_the_last_file_and_the_runs_own_stays(tmp_path: Path) -> None:
    store = PayloadStore(str(tmp_path))
    one, two = store.put("run", "g", 0, b"one", "codec"), store.put("run", "g", 1, b"two", "codec")
    store.delete(one.uri)
    assert [path.name for path in (tmp_path / "run" / "g").iterdir()] == ["1"]
    store.delete(two.uri)
    store.delete(two.uri)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_payload_is_written_though_somebody_takes_its_empty_directory_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archiver deletes the last file of an attempt at the moment at which another one is written there."""
    store, make, taken = PayloadStore(str(tmp_path)), Path.mkdir, []

    def taken_away(path: Path, *arguments: object, **options: object) -> None:
        make(path, *arguments, **options)  # type: ignore[arg-type]
        if path.name == "0" and len(taken) < 2:
            taken.append(path)
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", taken_away)
    assert store.get(store.put("run", "g", 0, b"payload", "codec")) == b"payload"
    assert len(taken) == 2


def test_bytes_are_kept_under_the_place_that_they_had_and_under_no_other(tmp_path: Path) -> None:
    here, there = PayloadStore(str(tmp_path / "here")), PayloadStore(str(tmp_path / "there"))
    ref = here.put("run", "g", 0, b"payload", "codec")
    there.keep(ref.uri, b"payload")
    assert there.get(ref) == b"payload"
    with pytest.raises(CorruptPayload):
        there.keep(ref.uri, b"other")


@pytest.mark.parametrize("name", ["ü" * 256, "x" * 256, "g\0", "", "%", ".", "..", "a/../b", "漢" * 30])
def test_a_group_may_have_any_name(tmp_path: Path, name: str) -> None:
    store = PayloadStore(str(tmp_path))
    refs = [store.put(name, other, 0, b"payload", "codec") for other in (name, name + "x")]
    assert [store.get(ref) for ref in refs] == [b"payload", b"payload"]
    assert len({ref.uri for ref in refs}) == 2
    assert {stored.uri for stored in store.list(name)} == {ref.uri for ref in refs}


@pytest.mark.parametrize(
    "place",
    [
        "",
        ".",
        "run",
        "run/g",
        "run/g/0",
        "g\0/g/0/{0}",
        "{0}/{0}/{0}/{0}/{0}",
        "\ud800/g/0/{0}",
        "xxx/g/0/{0}\n",
    ],
)
def test_a_reference_to_no_place_of_a_file_is_corrupt_and_not_a_fault_of_the_store(
    tmp_path: Path, place: str
) -> None:
    """A record may say anything, and whoever reads it must be able to go on."""
    store = PayloadStore(str(tmp_path))
    ref = store.put("run", "g", 0, b"payload", "codec")
    wrong = PayloadRef(place.format(ref.sha256), ref.sha256, ref.size, ref.codec)
    for read in (store.get, store.open_arrow):
        with pytest.raises(CorruptPayload):
            read(wrong)
    long = PayloadRef(f"{'x' * 300}/g/0/{ref.sha256}", ref.sha256, ref.size, ref.codec)
    with pytest.raises(CorruptPayload):
        store.get(long)
