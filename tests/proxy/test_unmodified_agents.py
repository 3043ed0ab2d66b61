"""OpenCode, Codex and Claude Code as npm has them, each finishing a small task through the proxy.

Nothing of them is configured but the base URL and a key. The engine is scripted: it calls a tool that writes a file, and, told
the result, says that it is done. `make test` installs the agents into the per-user cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from proxy_rig import Proxy, log_of, running_proxy, settings_for
from scripted_engine import ScriptedEngine
from tiny_chat import tiny_tokenizer

from schemas.events import TokenSegment, TrajectoryEnded
from schemas.settings import Settings
from schemas.tokens import ids_of
from schemas.topics import SEGMENTS

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hoofprint" / "agents"
BINARIES = CACHE / "node_modules" / ".bin"
TOKENIZER = tiny_tokenizer()
TASK = "Create the file hoof.txt with the text: print"
PATIENCE_S = 150

pytestmark = [
    pytest.mark.broker,
    pytest.mark.agents,
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(not BINARIES.is_dir(), reason=f"no agents in {CACHE}: make agents installs them"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(directory)
    return directory


def script(name: str, arguments: dict[str, Any]) -> Callable[[list[int]], list[int]]:
    """The policy: a call for a task, a word after its result, a title for everybody without tools."""
    call = {"name": name, "arguments": arguments}

    def tokens(prompt: list[int]) -> list[int]:
        text = str(TOKENIZER.decode(prompt))
        if "Tools:" not in text:
            reply = "A title"
        elif (
            text.rstrip()
            .removesuffix("<|im_start|>assistant")
            .rstrip()
            .endswith("</tool_response><|im_end|>")
        ):
            reply = "The file is there."
        else:
            reply = f"I will write it.<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return [*TOKENIZER.encode(reply, add_special_tokens=False), TOKENIZER.eos_token_id]

    return tokens


async def drive(directory: Path, environment: dict[str, str], *command: str) -> str:
    """The agent, headless, in a directory and a home of its own; what it said."""
    home = directory / "home"
    home.mkdir(exist_ok=True)
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", **environment}
    agent = await asyncio.create_subprocess_exec(
        str(BINARIES / command[0]), *command[1:], cwd=directory, env=env, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = await asyncio.wait_for(agent.communicate(), PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        await agent.wait()
    assert agent.returncode == 0, said.decode(errors="replace")[-4000:]
    return said.decode(errors="replace")


def agent_settings(broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path) -> Settings:
    engine.window = 1_000_000
    return settings_for(broker, tmp_path / "run", [engine.url], engine={"model": str(checkpoint)})


async def finished(proxy: Proxy, opened: dict[str, Any], settings: Settings) -> list[TokenSegment]:
    """End the session as a rollout worker does; the trajectory that the log has then, which must be the only one."""
    status, _ = await proxy.post("/session/finalize", {"session_id": opened["session_id"], "reward": 1.0})
    assert status == 200
    events = await asyncio.to_thread(log_of, settings, SEGMENTS)
    segments = [e for e in events if isinstance(e, TokenSegment)]
    assert {e.parent_traj_id for e in segments} == {opened["parent_traj_id"]}
    ends = [e.end for e in events if isinstance(e, TrajectoryEnded)]
    assert [(end.status, end.segment_count) for end in ends] == [("completed", len(segments))]
    assert [s.segment_index for s in segments] == list(range(len(segments)))
    assert {s.tito_mismatch_tokens for s in segments} == {0}
    return segments


def task_lineage(segments: list[TokenSegment]) -> list[TokenSegment]:
    """The lineage that called the tool; its second turn must have appended to the first."""
    first = next(s for s in segments if "<tool_call>" in text_of(s.output_ids))
    return [s for s in segments if s.lineage_id == first.lineage_id]


def text_of(ids: bytes) -> str:
    return str(TOKENIZER.decode(ids_of(ids).tolist()))


async def test_opencode_finishes_a_task_and_its_title_is_a_lineage_of_its_own(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    settings = agent_settings(broker, tmp_path, engine, checkpoint)
    engine.tokens = script("write", {"filePath": str(tmp_path / "hoof.txt"), "content": "print"})
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": opened["base_url"] + "/v1", "apiKey": "none"},
            "models": {"policy": {}},
        }
        config = {"provider": {"hoofprint": provider}, "model": "hoofprint/policy"}
        (tmp_path / "opencode.json").write_text(json.dumps(config))
        await drive(tmp_path, {}, "opencode", "run", TASK)
        segments = await finished(proxy, opened, settings)
    assert (tmp_path / "hoof.txt").read_text() == "print"
    task = task_lineage(segments)
    assert [text_of(s.output_ids) for s in task][1:] == ["The file is there.<|im_end|>"]
    titles = [s for s in segments if s not in task]
    assert [text_of(s.output_ids) for s in titles] == ["A title<|im_end|>"]
    assert {s.api for s in segments} == {"chat"}


async def test_codex_finishes_a_task(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    settings = agent_settings(broker, tmp_path, engine, checkpoint)
    engine.tokens = script("exec_command", {"cmd": "printf print > hoof.txt"})
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        home = tmp_path / "home" / ".codex"
        home.mkdir(parents=True)
        (home / "config.toml").write_text(
            'model = "policy"\nmodel_provider = "hoofprint"\n[model_providers.hoofprint]\nname = "hoofprint"\n'
            f'base_url = "{opened["base_url"]}/v1"\nwire_api = "responses"\n'
        )
        flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        said = await drive(tmp_path, {}, "codex", "exec", *flags, TASK)
        segments = await finished(proxy, opened, settings)
    assert (tmp_path / "hoof.txt").read_text() == "print"
    assert "The file is there." in said
    assert [text_of(s.output_ids) for s in task_lineage(segments)][1:] == ["The file is there.<|im_end|>"]
    assert {s.api for s in segments} == {"responses"}
    assert len(segments) == 2


async def test_claude_code_finishes_a_task(
    broker: str, tmp_path: Path, engine: ScriptedEngine, checkpoint: Path
) -> None:
    settings = agent_settings(broker, tmp_path, engine, checkpoint)
    engine.tokens = script("Write", {"file_path": str(tmp_path / "hoof.txt"), "content": "print"})
    async with running_proxy(settings) as proxy:
        opened = await proxy.open()
        environment = {
            "ANTHROPIC_BASE_URL": opened["base_url"],
            "ANTHROPIC_AUTH_TOKEN": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # not needed, but a test should phone nobody
        }
        said = await drive(tmp_path, environment, "claude", "-p", TASK, "--permission-mode", "acceptEdits")
        segments = await finished(proxy, opened, settings)
    assert (tmp_path / "hoof.txt").read_text() == "print"
    assert "The file is there." in said
    assert [text_of(s.output_ids) for s in task_lineage(segments)][1:] == ["The file is there.<|im_end|>"]
    assert {s.api for s in segments} == {"messages"}
