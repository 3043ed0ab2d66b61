"""Fetching SmolLM2: an installer that fails leaves nothing behind and says one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.errors import TransportError
from stack.models.smollm2 import CHECKPOINT, REQUIREMENTS, ensure_smollm2


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hoofprint"


def test_a_failing_installer_leaves_no_checkpoint(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installer = tmp_path / "uv"
    installer.write_text("#!/bin/sh\necho no route to the registry >&2\nexit 2\n")
    installer.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(TransportError, match="no route to the registry"):
        ensure_smollm2()
    assert [path.name for path in cache.iterdir()] == [f"{CHECKPOINT}.lock"]


def test_a_checkpoint_that_is_there_is_used_as_it_is(cache: Path) -> None:
    (cache / CHECKPOINT).mkdir(parents=True)
    assert ensure_smollm2() == cache / CHECKPOINT


def test_the_requirements_are_pinned_by_hash_and_name_no_address() -> None:
    text = REQUIREMENTS.read_text()
    assert text.count("--hash=sha256:") == 2
    assert "://" not in text
