"""Short ways to write a `control.v1` log in a test, and a hypothesis strategy for whole logs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from schemas import events as ev
from schemas.events import Effect, Event, identified
from schemas.ids import batch_id, stable_id
from schemas.settings import load
from streams.control_fold import fold
from streams.control_state import ControlState

RUN = "r"
Log = Sequence[tuple[int, Event]]


def configured(run_id: str = RUN, **sets: Any) -> ev.RunConfigured:
    """`window__keep_versions=1` and the like."""
    assignments = tuple(f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in sets.items())
    settings = load(sets=(f"run.run_id={run_id}", *assignments))
    return identified(
        ev.RunConfigured(
            run_id=run_id,
            occurred_at=1,
            settings=settings.to_json(),
            settings_digest=settings.digest(),
            software="0",
        )
    )


def keeps_odd_lengths(event: ev.GroupCompleted) -> bool:
    """A filter of a user."""
    return event.trajectories[0].output_tokens % 2 == 1


def admitted(group: str, attempt: int = 0, run_id: str = RUN, prompt: int = 0) -> ev.GroupAdmitted:
    return identified(
        ev.GroupAdmitted(
            run_id=run_id,
            occurred_at=2,
            group_id=group,
            attempt=attempt,
            group_size=2,
            prompt_index=prompt,
            dataset_epoch=0,
            prompt_digest="d",
        )
    )


def trajectory(
    group: str,
    attempt: int,
    index: int,
    version: str,
    reward: float | None,
    tokens: int = 3,
    context: int = 2,
    status: ev.TrajectoryStatus = "completed",
) -> ev.TrajectoryFacts:
    return ev.TrajectoryFacts(
        parent_traj_id=stable_id(group, attempt, index),
        sample_index=index,
        version=version,
        versions=(version,) if version else (),
        reward=reward,
        status=status,
        reason="done",
        segments=1,
        sequences=1,
        output_tokens=tokens,
        context_tokens=context,
        preemptions=0,
        abandoned_segments=0,
        tokens_digest="00",
        started_at=1,
        ended_at=2,
    )


def completed(
    group: str,
    versions: Sequence[str],
    attempt: int = 0,
    sequences: int | None = None,
    rewards: Sequence[float] = (),
    at: int = 3,
    tokens: int = 3,
    context: int = 2,
    failures: int = 0,
) -> ev.GroupCompleted:
    given = rewards or [float(index) for index in range(len(versions))]
    return identified(
        ev.GroupCompleted(
            run_id=RUN,
            occurred_at=at,
            group_id=group,
            attempt=attempt,
            payload=ev.PayloadRef(f"{RUN}/{group}/{attempt}/00", "00", 1, "group-arrow-v1"),
            sequences=len(versions) if sequences is None else sequences,
            trainable_tokens=6,
            trajectories=tuple(
                trajectory(
                    group,
                    attempt,
                    index,
                    version,
                    reward,
                    tokens,
                    context,
                    "failed" if index < failures else "completed",
                )
                for index, (version, reward) in enumerate(zip(versions, given, strict=True))
            ),
        )
    )


def failed(
    group: str, attempt: int = 0, versions: Sequence[str] = (), reason: str = "timeout"
) -> ev.GroupFailed:
    return identified(
        ev.GroupFailed(
            run_id=RUN,
            occurred_at=4,
            group_id=group,
            attempt=attempt,
            reason=reason,
            trajectories=tuple(trajectory(group, attempt, i, v, 0.0) for i, v in enumerate(versions)),
        )
    )


def published(version: str) -> ev.PolicyPublished:
    return identified(ev.PolicyPublished(run_id=RUN, occurred_at=5, version=version))


def requested(step: int, branch: str = "") -> ev.BatchRequested:
    return identified(
        ev.BatchRequested(
            run_id=RUN, occurred_at=6, step=step, branch=branch, batch_id=batch_id(RUN, step, branch)
        )
    )


def rolled_back(to_step: int, branch: str) -> ev.RolledBack:
    return identified(
        ev.RolledBack(run_id=RUN, occurred_at=7, to_step=to_step, branch=branch, reason="digest")
    )


def step_completed(step: int, branch: str = "") -> ev.StepCompleted:
    return identified(
        ev.StepCompleted(
            run_id=RUN,
            occurred_at=8,
            step=step,
            branch=branch,
            batch_id=batch_id(RUN, step, branch),
            digest="00",
            checkpoint_step=step,
            metrics={},
        )
    )


def dataset_ended() -> ev.DatasetEnded:
    return identified(ev.DatasetEnded(run_id=RUN, occurred_at=9, groups=0))


def run_ended() -> ev.RunEnded:
    return identified(ev.RunEnded(run_id=RUN, occurred_at=10, reason="done"))


def folded(log: Log, state: ControlState | None = None) -> list[Effect]:
    """Effects of a log."""
    into = ControlState(RUN) if state is None else state
    return [effect for offset, event in log for effect in fold(into, offset, event)]


def run_fold(*events: Event, state: ControlState | None = None) -> list[Effect]:
    """Effects of these events at offsets 0, 1, 2, …"""
    return folded(list(enumerate(events)), state)


def summary(effects: Iterable[Effect]) -> list[tuple[object, ...]]:
    """What a table in a test can hold: verdicts and batches without ids and facts."""
    lines: list[tuple[object, ...]] = []
    for effect in effects:
        match effect:
            case ev.Verdict():
                lines.append((effect.outcome, effect.group_id, effect.attempt, effect.reason))
            case ev.TrainBatch():
                lines.append(("batch", effect.step, *(group.group_id for group in effect.groups)))
            case ev.EndOfBatches():
                lines.append(("end", effect.reason))
            case _:
                raise AssertionError(effect)
    return lines


_GROUPS = st.sampled_from(["a", "b", "c", "d", "e"])
_ATTEMPTS = st.integers(0, 2)
_VERSIONS = st.sampled_from(["v1", "v2", "v3", "v4", "", "unknown"])
_EVENTS = st.one_of(
    st.builds(admitted, _GROUPS, _ATTEMPTS),
    st.builds(admitted, _GROUPS, prompt=st.integers(0, 1)),
    st.builds(completed, _GROUPS, st.lists(_VERSIONS, min_size=2, max_size=2), _ATTEMPTS),
    st.builds(completed, _GROUPS, st.lists(_VERSIONS, min_size=2, max_size=2)),
    st.builds(completed, _GROUPS, st.just(("v1", "v2")), rewards=st.just((1.0, 1.0))),
    st.builds(
        completed,
        _GROUPS,
        st.just(("v1", "v2")),
        _ATTEMPTS,
        tokens=st.integers(0, 40),
        context=st.integers(0, 40),
        failures=st.integers(0, 2),
    ),
    st.builds(failed, _GROUPS, _ATTEMPTS, st.lists(_VERSIONS, max_size=2)),
    st.builds(published, _VERSIONS),
    st.builds(requested, st.integers(1, 6)),
    st.builds(requested, st.integers(1, 6), st.just("b1")),
    st.builds(rolled_back, st.integers(0, 3), st.sampled_from(["b1", "b2"])),
    st.builds(step_completed, st.integers(1, 6)),
)
_ENDS = st.sampled_from([(), (dataset_ended(),), (run_ended(),), (dataset_ended(), run_ended())])


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """A configured run with anything in any order; ends now and then in the middle."""
    settings = draw(
        st.fixed_dictionaries(
            {
                "window__keep_versions": st.integers(0, 3),
                "window__order": st.sampled_from(["published", "observed"]),
                "group__on_stale": st.sampled_from(["drop", "requeue"]),
                "group__max_retries": st.integers(0, 2),
                "group__drop_zero_variance": st.booleans(),
                "group__min_live_trajectories": st.integers(0, 2),
                "group__filter": st.sampled_from(["", "control_log:keeps_odd_lengths"]),
                "retry__policy": st.sampled_from(["always", "budget"]),
                "retry__share": st.sampled_from([0.1, 0.5, 1.0]),
                "batch__by": st.sampled_from(["groups", "sequences"]),
                "batch__size": st.integers(1, 3),
                "batch__sampler": st.sampled_from(["fifo", "freshest_first"]),
                "batch__short_last": st.booleans(),
            }
        )
    )
    body = draw(st.lists(_EVENTS, max_size=40))
    tail = draw(st.lists(_EVENTS, max_size=5))
    return [configured(**settings), *body, *draw(_ENDS), *tail]
