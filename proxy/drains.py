"""Which engines an operator has drained, over restarts of the proxy: `drained_engines.json` in the run's directory.

An operator who took an engine out for its machine's sake does not expect it back because the proxy's process died. The file is
read at the start alone: a drain is one proxy's own as long as it runs. Invariant: the file is replaced whole.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from schemas.errors import ConfigError, StoreError

_FILE = "drained_engines.json"


class Drains:
    """The ids of drained engines, on disk."""

    def __init__(self, run_directory: Path) -> None:
        self._file = run_directory / _FILE

    def read(self) -> set[str]:
        """Ids of engines; none where there is no file. ConfigError: it holds something else."""
        try:
            found = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            return set()
        except (OSError, ValueError) as wrong:
            raise ConfigError(f"{self._file} cannot be read: {wrong}", file=str(self._file)) from wrong
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise ConfigError(f"{self._file} is not a list of engine ids", file=str(self._file))
        return set(found)

    def keep(self, engine_id: str, *, drained: bool) -> None:
        """Add an engine, or take it out. StoreError: the file says what it said before."""
        before = self.read()
        after = before | {engine_id} if drained else before - {engine_id}
        if after == before:
            return
        temporary = self._file.with_name(f".{_FILE}.{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(sorted(after)))
            temporary.replace(self._file)
        except OSError as problem:
            raise StoreError(f"{self._file} cannot be written: {problem}", file=str(self._file)) from problem
