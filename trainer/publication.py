"""A new version becomes known: export, `PolicyPublished`, and the proxy's word to the engines.

The order makes a kill harmless: the directory is whole before the log names it, and the log names it before
an engine can have it. A proxy that is away learns the version from the log when it comes back, so offering it
here needs patience but no success.
"""

from __future__ import annotations

import http.client
import json
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from journal.clock import Clock
from schemas.events import Event, PolicyPublished, identified
from schemas.settings import ProxySettings

LOG = structlog.get_logger()
UPDATE_S = 120.0  # engines load the weights within one call


Publish = Callable[[Event], object]  # acknowledged produce, as `journal.producer.AckProducer.publish`


class ProxyGate:
    """`POST /v1/policy/versions` at the proxy, retried every `retry_s` for `patience_s`."""

    def __init__(self, proxy: ProxySettings, patience_s: float, retry_s: float = 0.5) -> None:
        self._address = (proxy.host, proxy.port)
        self._headers = {"Content-Type": "application/json"}
        if proxy.admin_key:
            self._headers["Authorization"] = f"Bearer {proxy.admin_key}"
        self._patience_s = patience_s
        self._retry_s = retry_s

    def offer(self, version: str, checkpoint: Path, step: int) -> bool:
        """Whether the proxy has taken the version. A refusal is not repeated.

        Silence is, for the patience.
        """
        if not self._address[1] or not self._patience_s:
            return False
        body = json.dumps({"version": version, "checkpoint_uri": str(checkpoint), "step": step})
        deadline = time.monotonic() + self._patience_s
        while True:
            status, answer = self._post(body)
            if status == http.client.OK:
                return True
            if http.client.BAD_REQUEST <= status < http.client.INTERNAL_SERVER_ERROR:
                LOG.error("version refused by the proxy", version=version, status=status, answer=answer)
                return False
            if time.monotonic() >= deadline:
                LOG.warning(
                    "the proxy did not take the version", version=version, status=status, answer=answer
                )
                return False
            time.sleep(self._retry_s)

    def _post(self, body: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(*self._address, timeout=UPDATE_S)
        try:
            connection.request("POST", "/v1/policy/versions", body, self._headers)
            response = connection.getresponse()
            return response.status, response.read(2000).decode(errors="replace")
        except (OSError, http.client.HTTPException) as away:
            return 0, str(away)
        finally:
            connection.close()


class Publication:
    """Exports of one run under `directory`, one per version label."""

    def __init__(
        self, directory: Path, export: Callable[[Path], None], publish: Publish, gate: ProxyGate, clock: Clock
    ) -> None:
        self._directory = directory.absolute()
        self._export = export
        self._publish = publish
        self._gate = gate
        self._clock = clock

    def announce(self, run_id: str, version: str, step: int, branch: str, digest: str) -> None:
        """Export the present weights, then put `PolicyPublished` into the log."""
        path = self._directory / version
        self._export(path)
        event = PolicyPublished(
            run_id=run_id,
            occurred_at=self._clock(),
            version=version,
            checkpoint_uri=str(path),
            step=step,
            branch=branch,
            digest=digest,
        )
        self._publish(identified(event))

    def offer(self, version: str, step: int) -> bool:
        """Let the proxy bring the version to the engines."""
        return self._gate.offer(version, self._directory / version, step)

    def prune(self, keep: Iterable[str]) -> None:
        """Remove exports whose label is not in `keep`. What cannot be removed is reported and left."""
        remove_others(self._directory, set(keep))


def remove_others(directory: Path, keep: set[str]) -> None:
    """Remove the subdirectories of `directory` that `keep` does not name.

    A failure is logged, never raised.
    """
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir()):
        if path.is_dir() and path.name not in keep:
            try:
                shutil.rmtree(path)
            except OSError as problem:
                LOG.warning("cannot remove an old directory", path=str(path), problem=str(problem))
