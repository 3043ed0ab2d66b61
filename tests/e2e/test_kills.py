"""kill -9 of each process in the middle of a small run: the run goes on, ends by itself, and every law of the demo holds.

The demo's own exit status is the judge: it is 0 only if each admitted group has exactly one terminal verdict, no batch holds
a group outside its window, every answer that a client received whole is in the archive with its digest, no batch contributed
twice, and the archive replays byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from demo_run import DemoRun

STEPS = 12
VICTIMS = ("assembler", "proxy", "trainer", "controller", "broker", "engine", "rollout", "feeder", "archiver")


@pytest.mark.e2e
@pytest.mark.timeout(420)
def test_every_process_may_be_killed(start_demo: Callable[..., DemoRun]) -> None:
    run = start_demo(STEPS)
    for step, victim in enumerate(VICTIMS, start=1):
        run.wait_for_steps(step, 120)
        run.kill(victim)
    assert run.wait(240) == 0, run.said()
    restarts = {name: child["restarts"] for name, child in run.children().items()}
    assert all(restarts[victim] >= 1 for victim in VICTIMS), restarts
    assert "failed checks" not in run.said()
