"""Java choice: JAVA_HOME, then the PATH, then the wheel; each only if it is 17 or newer."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.errors import ConfigError
from stack.broker.java import find_java, java_version


def fake_java(home: Path, *, release: str | None = None, says: str = "") -> Path:
    """A Java installation: with a `release` file, or one that must be asked."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    java.chmod(0o755)
    if release:
        (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{release}"\n')
    return java


def no_wheel() -> None:
    return None


@pytest.mark.parametrize(
    ("release", "says", "version"),
    [
        ("17.0.15", "", 17),
        ("25", "", 25),
        ("1.8.0_402", "", 8),
        (None, 'openjdk version "21.0.2" 2024-01-16', 21),
        (None, 'java version "1.8.0_202"', 8),
        (None, "command failed", None),
    ],
)
def test_version(tmp_path: Path, release: str | None, says: str, version: int | None) -> None:
    assert java_version(fake_java(tmp_path, release=release, says=says)) == version


def test_java_home_goes_before_the_path(tmp_path: Path) -> None:
    chosen = fake_java(tmp_path / "home", release="17")
    on_path = fake_java(tmp_path / "path", release="21")
    assert find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(on_path.parent)}, no_wheel) == chosen


def test_a_java_home_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    fake_java(tmp_path / "home", release="11.0.2")
    on_path = fake_java(tmp_path / "path", release="21")
    assert find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(on_path.parent)}, no_wheel) == on_path


def test_the_wheel_is_the_last_resort(tmp_path: Path) -> None:
    on_path = fake_java(tmp_path / "path", release="16")
    bundled = fake_java(tmp_path / "wheel", release="25")
    assert find_java({"PATH": str(on_path.parent)}, lambda: bundled) == bundled


def test_no_usable_java_names_all_that_was_seen(tmp_path: Path) -> None:
    old = fake_java(tmp_path / "path", release="1.8.0")
    environ = {"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(old.parent)}
    with pytest.raises(ConfigError) as none:
        find_java(environ, no_wheel)
    assert "is Java 8" in none.value.message
    assert str(tmp_path / "gone") in none.value.message
    assert "17 or newer" in none.value.message
