"""Offering a version to the proxy: patience with silence, none with a refusal; old exports go."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from schemas.errors import StoreError
from schemas.events import Event, PolicyPublished
from schemas.settings import ProxySettings
from trainer.publication import ProxyGate, Publication, remove_others


@contextmanager
def answering(statuses: list[int]) -> Iterator[tuple[int, list[tuple[str, str, dict[str, object]]]]]:
    """An HTTP server that answers the given statuses in turn; its port and what it was sent."""
    seen: list[tuple[str, str, dict[str, object]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, self.headers.get("Authorization", ""), body))
            self.send_response(statuses[min(len(seen), len(statuses)) - 1])
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.server_port, seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def gate(port: int, patience_s: float = 5.0) -> ProxyGate:
    return ProxyGate(ProxySettings(port=port, admin_key="secret"), patience_s, retry_s=0.01)


def test_version_is_posted_with_its_directory_and_the_key() -> None:
    with answering([200]) as (port, seen):
        assert gate(port).offer("v000001", Path("/policies/v000001"), 1)
    body = {"version": "v000001", "checkpoint_uri": "/policies/v000001", "step": 1}
    assert seen == [("/v1/policy/versions", "Bearer secret", body)]


def test_proxy_that_is_not_ready_is_asked_again() -> None:
    with answering([503, 503, 200]) as (port, seen):
        assert gate(port).offer("v000001", Path("/p"), 1)
    assert len(seen) == 3


def test_refusal_is_not_repeated() -> None:
    with answering([409]) as (port, seen):
        assert not gate(port).offer("v000001", Path("/p"), 1)
    assert len(seen) == 1


def test_patience_ends() -> None:
    with answering([200]) as (port, _):
        pass  # nobody listens there any more
    assert not gate(port, patience_s=0.05).offer("v000001", Path("/p"), 1)


@pytest.mark.parametrize(("port", "patience_s"), [(0, 5.0), (1, 0.0)])
def test_without_a_proxy_or_patience_nothing_is_tried(port: int, patience_s: float) -> None:
    assert not gate(port, patience_s).offer("v000001", Path("/p"), 1)


def test_log_names_a_version_only_when_its_directory_is_whole(tmp_path: Path) -> None:
    log: list[Event] = []

    def export(path: Path) -> None:
        assert not log
        path.mkdir(parents=True)

    make = Publication(tmp_path, export, log.append, gate(0), lambda: 7)
    make.announce("run", "v000001", 1, "", "digest")
    (event,) = log
    assert isinstance(event, PolicyPublished)
    assert (event.version, event.step, event.digest, event.occurred_at) == ("v000001", 1, "digest", 7)
    assert event.checkpoint_uri == str(tmp_path / "v000001")


def test_failed_export_publishes_nothing(tmp_path: Path) -> None:
    log: list[Event] = []

    def export(path: Path) -> None:
        raise StoreError("disk full", path=str(path))

    with pytest.raises(StoreError):
        Publication(tmp_path, export, log.append, gate(0), lambda: 7).announce("run", "v1", 1, "", "digest")
    assert log == []


def test_old_exports_go_and_named_ones_stay(tmp_path: Path) -> None:
    for name in ("v000001", "v000002", "v000003.writing"):
        (tmp_path / name).mkdir()
    (tmp_path / "note").write_text("a file is not ours to remove")
    remove_others(tmp_path, {"v000002"})
    remove_others(tmp_path / "absent", set())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["note", "v000002"]
