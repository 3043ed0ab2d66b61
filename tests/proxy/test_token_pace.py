"""How many tokens an engine is asked to put into one event of a stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from proxy_rig import running_proxy, settings_for
from scripted_engine import ScriptedEngine

from proxy.token_pace import TokenPace


@pytest.mark.parametrize(
    ("replies", "frame_s", "interval"),
    [
        ([], 0.04, 1),  # nothing is known
        ([(100, 0.5)], 0.04, 8),  # 5 ms a token
        ([(100, 0.5)], 0.0, 1),  # a frame for every token
        ([(100, 10.0)], 0.04, 1),  # slower than frames
        ([(100, 0.01)], 0.04, 64),  # the most
        ([(100, 0.5), (7, 0.001), (0, 1.0), (100, 0.0)], 0.04, 8),  # these say nothing
        ([(100, 0.5), *[(100, 2.0)] * 20], 0.04, 2),  # it has become slower
    ],
)
def test_an_event_holds_what_comes_in_the_time_of_a_frame(
    replies: list[tuple[int, float]], frame_s: float, interval: int
) -> None:
    pace = TokenPace()
    for tokens, seconds in replies:
        pace.observe(tokens, seconds)
    assert pace.tokens_in(frame_s, 64) == interval


@pytest.mark.broker
@pytest.mark.parametrize(("asked", "intervals"), [(0, [1, 64, 64]), (1, [1, 1, 1]), (3, [3, 3, 3])])
async def test_a_stream_asks_for_no_more_events_than_frames(
    broker: str, tmp_path: Path, engine: ScriptedEngine, asked: int, intervals: list[int]
) -> None:
    engine.delay_s = 0.0001
    proxy_settings = {"engine_stream_interval_streamed": asked, "stream_frame_s": 3600.0}
    settings = settings_for(broker, tmp_path, [engine.url], proxy=proxy_settings)
    async with running_proxy(settings) as proxy:
        for number in range(3):
            opened = await proxy.open(f"g{number}")
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 20}, "stream": True}
            async with proxy.http.post(opened["base_url"] + "/generate", json=body) as reply:
                assert (await reply.read()).endswith(b"data: [DONE]\n\n")
    assert [sent["sampling_params"].get("stream_interval", 1) for sent in engine.bodies] == intervals
