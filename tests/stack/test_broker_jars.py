"""The lock file decides which bytes run, and an installation is whole or absent."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from schemas.errors import ConfigError, TransportError
from stack.broker import jars
from stack.broker.jars import Jar, cache_root, ensure_jars, locked_jars

GOOD = b"the bytes that were locked"
BAD = b"other bytes"
SMALL_LOCK = tuple(
    Jar(f"org.example:part{n}:1.0", hashlib.sha256(GOOD).hexdigest(), len(GOOD)) for n in range(20)
)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def small_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock of 20 tiny jars in the place of the real one; returns an empty cache."""
    lock = tmp_path / "lock.tsv"
    lock.write_text("".join(f"{jar.coordinate}\t{jar.sha256}\t{jar.size}\n" for jar in SMALL_LOCK))
    monkeypatch.setattr(jars, "_LOCK_FILE", lock)
    return tmp_path / "cache"


def fetch_good(jar: Jar, scratch: Path) -> Path:
    path = scratch / f"fetched-{jar.file_name}"
    path.write_bytes(GOOD)
    return path


def fetch_one_bad(jar: Jar, scratch: Path) -> Path:
    path = fetch_good(jar, scratch)
    if jar == SMALL_LOCK[7]:
        path.write_bytes(BAD)
    return path


def no_network(jar: Jar, scratch: Path) -> Path:
    raise ConnectionError("name resolution failed")


def test_the_lock_names_the_46_jars_of_kafka_4_3_1() -> None:
    locked = locked_jars()
    assert len({jar.file_name for jar in locked}) == 46
    assert all(len(jar.sha256) == 64 and jar.size > 0 for jar in locked)
    assert any(jar.file_name == "kafka_2.13-4.3.1.jar" for jar in locked)


def test_the_cache_is_per_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "hoofprint"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "hoofprint"


def test_a_first_call_installs_and_a_second_fetches_nothing(small_lock: Path) -> None:
    home = ensure_jars(small_lock, fetch=fetch_good)
    assert home == small_lock / "kafka-4.3.1"
    assert {path.name for path in home.iterdir()} == {jar.file_name for jar in SMALL_LOCK}
    assert ensure_jars(small_lock, fetch=no_network) == home


def test_a_fetched_jar_with_another_digest_is_refused_with_both_and_nothing_is_installed(
    small_lock: Path,
) -> None:
    with pytest.raises(ConfigError) as refused:
        ensure_jars(small_lock, fetch=fetch_one_bad)
    assert sha256(GOOD) in refused.value.message
    assert sha256(BAD) in refused.value.message
    assert refused.value.detail["coordinate"] == "org.example:part7:1.0"
    assert [path.name for path in small_lock.iterdir()] == ["kafka-4.3.1.lock"]


def test_a_jar_that_was_changed_in_the_cache_is_refused(small_lock: Path) -> None:
    home = ensure_jars(small_lock, fetch=fetch_good)
    (home / SMALL_LOCK[3].file_name).write_bytes(BAD)
    with pytest.raises(ConfigError) as refused:
        ensure_jars(small_lock, fetch=fetch_good)
    assert refused.value.detail["expected"] == sha256(GOOD)
    assert refused.value.detail["found"] == sha256(BAD)


def test_a_jar_that_is_missing_from_the_cache_is_refused(small_lock: Path) -> None:
    home = ensure_jars(small_lock, fetch=fetch_good)
    (home / SMALL_LOCK[3].file_name).unlink()
    with pytest.raises(ConfigError, match="no file"):
        ensure_jars(small_lock, fetch=fetch_good)


def test_an_interrupted_installation_is_done_again(small_lock: Path) -> None:
    left_over = small_lock / "kafka-4.3.1.partial" / "lib"
    left_over.mkdir(parents=True)
    (left_over / SMALL_LOCK[0].file_name).write_bytes(BAD)
    home = ensure_jars(small_lock, fetch=fetch_good)
    assert (home / SMALL_LOCK[0].file_name).read_bytes() == GOOD


def test_without_a_network_one_sentence_says_what_is_missing_and_where_it_belongs(tmp_path: Path) -> None:
    with pytest.raises(TransportError) as missing:
        ensure_jars(tmp_path, fetch=no_network)
    assert "Kafka 4.3.1 is missing" in missing.value.message
    assert "46 jars (45 MB)" in missing.value.message
    assert str(tmp_path / "kafka-4.3.1") in missing.value.message
    assert "\n" not in missing.value.message
    assert not (tmp_path / "kafka-4.3.1").exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(TransportError, match=r"File exists|Not a directory"):
        ensure_jars(tmp_path / "file", fetch=fetch_good)
