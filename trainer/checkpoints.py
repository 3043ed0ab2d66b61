"""The trainer's durable states: `<run>/checkpoints/<version label>`, each with all that its `StepCompleted`
says.

So a step whose checkpoint is durable but whose event was not sent can be announced after a restart with the
very facts of the first time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

from schemas.errors import CorruptPayload
from schemas.events import StepCompleted
from trainer.backends.checkpoint import read_meta
from trainer.backends.contract import Backend
from trainer.control_view import version_label
from trainer.publication import remove_others
from trainer.recovery import CheckpointFact

LOG = structlog.get_logger()


class CheckpointShelf:
    """Checkpoints of one run in one directory; the newest `keep` stay."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    def save(self, backend: Backend, completed: StepCompleted, parent_digest: str) -> None:
        """Make the present weights durable as the state after `completed.step`."""
        path = self._directory / version_label(completed.step, completed.branch)
        meta = {"parent_digest": parent_digest, "completed": msgspec.to_builtins(completed)}
        backend.save(path, meta)
        newest = sorted(self.facts(), key=lambda fact: fact.step)[-self._keep :]
        remove_others(self._directory, {fact.path.name for fact in newest} | {path.name})

    def facts(self) -> list[CheckpointFact]:
        """All whole checkpoints; one that cannot be read is reported and left out."""
        if not self._directory.is_dir():
            return []
        found = []
        for path in sorted(self._directory.iterdir()):
            if path.is_dir() and not path.name.startswith(".") and path.suffix == "":
                try:
                    found.append(_fact(path, _meta(path)))
                except CorruptPayload as wrong:
                    LOG.warning("a checkpoint cannot be read", error=wrong)
        return found

    def completed(self, fact: CheckpointFact) -> StepCompleted:
        """The event of the checkpoint's step, as it was made when the step was trained."""
        return _completed(fact.path, _meta(fact.path))


def _meta(path: Path) -> Mapping[str, Any]:
    meta = read_meta(path).get("meta")
    if not isinstance(meta, dict):
        raise CorruptPayload("meta.json is not a checkpoint's of the trainer", path=str(path))
    return meta


def _completed(path: Path, meta: Mapping[str, Any]) -> StepCompleted:
    try:
        return msgspec.convert(meta["completed"], StepCompleted)
    except (KeyError, msgspec.ValidationError) as wrong:
        raise CorruptPayload("meta.json names no completed step", path=str(path)) from wrong


def _fact(path: Path, meta: Mapping[str, Any]) -> CheckpointFact:
    completed = _completed(path, meta)
    return CheckpointFact(
        path=path,
        step=completed.step,
        branch=completed.branch,
        digest=completed.digest,
        parent_digest=str(meta.get("parent_digest", "")),
    )
