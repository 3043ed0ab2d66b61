"""The worker's own record of every whole answer that it received, written before the answer is used.

It is the outside witness of the law "every answer that a client received whole is in the log": the archive must contain
each digest here. One `write` per line on a file opened for appending, so that kill -9 cannot tear a line; not synced,
because a power loss takes the agent's use of the answer with it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import orjson

from schemas.tokens import pack_ids


class AnswerLog:
    """Appends to one file of its own. Fields: parent_traj_id, segment_index, attempt, group_id, kind, digest, text."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def tokens(self, where: dict[str, Any], output_ids: Sequence[int]) -> None:
        """A native answer: sha256 of the output ids as little-endian int32."""
        self._append(where, "ids", hashlib.sha256(pack_ids(output_ids)).hexdigest(), None)

    def text(self, where: dict[str, Any], content: str) -> None:
        """A chat answer: sha256 of the content's utf-8, and the content itself for people."""
        self._append(where, "text", hashlib.sha256(content.encode()).hexdigest(), content)

    def _append(
        self, where: dict[str, Any], kind: Literal["ids", "text"], digest: str, text: str | None
    ) -> None:
        record = {**where, "kind": kind, "digest": digest}
        if text is not None:
            record["text"] = text
        os.write(self._fd, orjson.dumps(record) + b"\n")

    def close(self) -> None:
        """Close the file; it stays."""
        os.close(self._fd)
