"""The broker's jars: fetched once per user, checked against `jars.lock.tsv` at every start.

The lock file is the only authority: a jar is used if its sha256 is the locked one, wherever the bytes came
from. jgo (a Maven resolver in Python) knows the repository, so no address stands here.

Invariants: the directory `kafka-4.3.1` appears whole and verified or not at all (it is renamed into place);
two processes that start at once fetch once (a lock file beside it); a jar with another digest is never put on
a class path.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import ConfigError, TransportError

KAFKA_VERSION = "4.3.1"
FETCH_THREADS = 8
_LOCK_FILE = Path(__file__).with_name("jars.lock.tsv")


@dataclass(frozen=True, slots=True)
class Jar:
    """One line of the lock file."""

    coordinate: str  # group:artifact:version
    sha256: str
    size: int

    @property
    def file_name(self) -> str:
        _, artifact, version = self.coordinate.split(":")
        return f"{artifact}-{version}.jar"


Fetch = Callable[[Jar, Path], Path]
"""Brings one jar below the scratch directory and returns its path; OSError or RuntimeError if it cannot."""


def locked_jars() -> tuple[Jar, ...]:
    """What `jars.lock.tsv` says."""
    rows = (line.split("\t") for line in _LOCK_FILE.read_text().splitlines() if not line.startswith("#"))
    return tuple(Jar(coordinate, sha256, int(size)) for coordinate, sha256, size in rows)


def cache_root() -> Path:
    """Where this user's caches of ours live: `$XDG_CACHE_HOME/hoofprint`, else `~/.cache/hoofprint`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hoofprint"


def fetch_by_jgo(jar: Jar, scratch: Path) -> Path:
    """Fetch one jar from the repository that jgo is configured for."""
    from jgo.maven import MavenContext

    group, artifact, version = jar.coordinate.split(":")
    context = MavenContext(repo_cache=scratch / "repository")
    found = context.project(group, artifact).at_version(version).artifact().resolve()
    if found is None:
        raise RuntimeError(f"{jar.coordinate} was not found")
    return Path(found)


def verify(jar: Jar, path: Path) -> None:
    """Refuse (ConfigError) a file that is not the locked jar, byte for byte."""
    found = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "no file"
    if found != jar.sha256:
        raise ConfigError(
            f"{path} is not the locked {jar.coordinate} and is not used: expected sha256 {jar.sha256}, "
            f"found {found}. Remove {path.parent} to have the jars fetched again.",
            path=str(path),
            coordinate=jar.coordinate,
            expected=jar.sha256,
            found=found,
        )


def ensure_jars(cache: Path | None = None, *, fetch: Fetch = fetch_by_jgo) -> Path:
    """The directory that holds the locked jars, fetched if this user never did.

    `cache` takes the place of `cache_root()`. Raises ConfigError for a wrong digest, TransportError where the
    jars cannot be fetched or stored.
    """
    root = cache or cache_root()
    home = root / f"kafka-{KAFKA_VERSION}"
    if not home.is_dir():
        try:
            with _exclusive(root):
                if not home.is_dir():  # another process may have installed it while this one waited
                    _install(home, fetch)
        except (OSError, RuntimeError) as error:
            raise _missing(home, error) from error
    for jar in locked_jars():  # 45 MB: about 50 ms, little beside the JVM's start
        verify(jar, home / jar.file_name)
    return home


@contextlib.contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    """Hold the installer's lock; it ends with the process, so a crash leaves no stale one."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"kafka-{KAFKA_VERSION}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _install(home: Path, fetch: Fetch) -> None:
    """Fetch and verify everything beside `home`, then rename. The caller holds the installer's lock."""
    partial = home.with_name(home.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # what an interrupted installation left
    lib = partial / "lib"
    lib.mkdir(parents=True)
    try:
        with ThreadPoolExecutor(FETCH_THREADS) as pool:
            fetched = [(jar, pool.submit(fetch, jar, partial)) for jar in locked_jars()]
            try:
                for jar, path in fetched:
                    verify(jar, path.result())
                    path.result().replace(lib / jar.file_name)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # not 46 time-outs one after the other
                raise
        lib.rename(home)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _missing(home: Path, cause: OSError | RuntimeError) -> TransportError:
    jars = locked_jars()
    megabytes = sum(jar.size for jar in jars) // 1_000_000
    # A network error of jgo's HTTP library is an OSError without errno; its text is a page of addresses.
    reason = (cause.strerror if isinstance(cause, OSError) else None) or type(cause).__name__
    return TransportError(
        f"Kafka {KAFKA_VERSION} is missing: its {len(jars)} jars ({megabytes} MB) are not in {home} and "
        f"could not be fetched ({reason}). Have a network once, copy that directory from another machine, or "
        f"name a running broker in the configuration.",
        directory=str(home),
        jars=len(jars),
        cause=str(cause),
    )
