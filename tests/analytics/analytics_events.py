"""Events of a small run, written by hand: the least that each test needs, everything else at a plain default."""

from __future__ import annotations

from collections.abc import Sequence

from schemas import events as ev
from schemas import ids
from schemas.tokens import pack_ids, pack_logprobs
from schemas.versions import VersionSpan

RUN = "r"
AT = 1_700_000_000_000_000


def published(version: str, step: int | None = None) -> ev.PolicyPublished:
    return ev.identified(ev.PolicyPublished(run_id=RUN, occurred_at=AT, version=version, step=step))


def admitted(group: str, attempt: int = 0, index: int = 0) -> ev.GroupAdmitted:
    return ev.identified(
        ev.GroupAdmitted(
            run_id=RUN, occurred_at=AT, group_id=group, attempt=attempt, group_size=2, prompt_index=index, dataset_epoch=0,
            prompt_digest="d",
        )
    )  # fmt: skip


def segment(
    group: str,
    sample: int,
    index: int,
    *,
    attempt: int = 0,
    epoch: int = 1,
    context: Sequence[int] = (1, 2),
    output: Sequence[int] = (3, 4, 5),
    spans: Sequence[tuple[str, int, int]] = (("v0", 0, 3),),
    lineage_start: int = 0,
    parent: int | None = None,
    digest: str | None = None,
    received_at: int = AT,
    end: ev.EndFacts | None = None,
    preemptions: int = 0,
) -> ev.TokenSegment:
    trajectory = ids.parent_traj_id(RUN, group, attempt, sample)
    return ev.identified(
        ev.TokenSegment(
            run_id=RUN, occurred_at=received_at + 3, session_id=trajectory, epoch=epoch, parent_traj_id=trajectory,
            group_id=group, attempt=attempt, sample_index=sample, segment_index=index,
            lineage_id=ids.lineage_id(trajectory, lineage_start), parent_segment_index=parent, api="generate",
            context_ids=pack_ids(context), output_ids=pack_ids(output), output_logprobs=pack_logprobs([-0.5] * len(output)),
            spans=tuple(VersionSpan(*span) for span in spans), version_at_dispatch=spans[0][0] if spans else "unknown",
            engine_id="e0", finish_reason="stop", request_digest=digest or f"q{index}", sampling="{}",
            prompt_tokens=len(context), preemptions=preemptions, received_at=received_at, first_token_at=received_at + 1,
            done_at=received_at + 2, started=index == 0, end=end,
        )
    )  # fmt: skip
