"""Events of made-up sessions, so that a test reads as the story it tells."""

from __future__ import annotations

from schemas import events as ev
from schemas import ids
from schemas.tokens import pack_ids, pack_logprobs
from schemas.versions import VersionSpan

RUN = "run"


class Session:
    """One trajectory of an attempt. Times count up by themselves; every event is identified."""

    def __init__(
        self,
        group: str = "g",
        sample: int = 0,
        *,
        attempt: int = 0,
        epoch: int = 1,
        run: str = RUN,
        at: int = 0,
    ) -> None:
        self.group, self.sample, self.attempt, self.epoch, self.run = group, sample, attempt, epoch, run
        self.traj = ids.parent_traj_id(run, group, attempt, sample)
        self.clock = at + 1000 * (sample + 1)
        self.lineage = ids.lineage_id(self.traj, 0)

    def common(self) -> dict[str, object]:
        self.clock += 10
        return {
            "run_id": self.run, "occurred_at": self.clock, "session_id": self.traj, "epoch": self.epoch,
            "parent_traj_id": self.traj, "group_id": self.group, "attempt": self.attempt, "sample_index": self.sample,
        }  # fmt: skip

    def claim(self, epoch: int | None = None, restart: bool = False) -> ev.SessionClaimed:
        self.epoch = self.epoch if epoch is None else epoch
        return ev.identified(ev.SessionClaimed(**self.common(), claimant="proxy", restart=restart))  # type: ignore[arg-type]

    def start(self) -> ev.TrajectoryStarted:
        return ev.identified(ev.TrajectoryStarted(**self.common()))  # type: ignore[arg-type]

    def segment(
        self, index: int, context: list[int], output: list[int], *, version: str = "v0",
        spans: tuple[VersionSpan, ...] | None = None, parent: int | None = None, branch: int | None = None,
        lineage: str | None = None, digest: str | None = None, end: ev.EndFacts | None = None,
        received: int | None = None, done: int | None = None, preemptions: int = 0,
    ) -> ev.TokenSegment:  # fmt: skip
        common = self.common()
        now = self.clock
        return ev.identified(
            ev.TokenSegment(
                **common,  # type: ignore[arg-type]
                segment_index=index,
                lineage_id=lineage or self.lineage,
                parent_segment_index=parent,
                branch_point=branch,
                api="generate",
                context_ids=pack_ids(context),
                output_ids=pack_ids(output),
                output_logprobs=pack_logprobs([-0.5 * token for token in output]),
                spans=spans
                if spans is not None
                else (VersionSpan(version, 0, len(output)),)
                if output
                else (),
                version_at_dispatch=version,
                engine_id="engine",
                finish_reason="stop",
                request_digest=digest if digest is not None else f"digest-{index}",
                sampling="{}",
                prompt_tokens=len(context),
                preemptions=preemptions,
                received_at=now - 5 if received is None else received,
                first_token_at=now - 3,
                done_at=now - 1 if done is None else done,
                end=end,
            )
        )

    def end(
        self, segments: int, *, reward: float | None = 1.0, pending: bool = False,
        status: ev.TrajectoryStatus = "completed", reason: str = "done",
    ) -> ev.TrajectoryEnded:  # fmt: skip
        facts = end_facts(segments, reward=reward, pending=pending, status=status, reason=reason)
        return ev.identified(ev.TrajectoryEnded(**self.common(), end=facts))  # type: ignore[arg-type]

    def reward(self, value: float, source: str = "judge", epoch: int | None = None) -> ev.RewardAssigned:
        self.clock += 10
        return ev.identified(
            ev.RewardAssigned(
                run_id=self.run, occurred_at=self.clock, parent_traj_id=self.traj, group_id=self.group,
                attempt=self.attempt, sample_index=self.sample, epoch=epoch, reward=value,
                source=source,
            )
        )  # fmt: skip

    def whole(self, turns: int = 2, reward: float = 1.0) -> list[ev.Event]:
        """Claim, start, a chain of turns under changing versions, and the end."""
        events: list[ev.Event] = [self.claim(), self.start()]
        for turn in range(turns):
            base = 100 * self.sample + 10 * turn
            parent = turn - 1 if turn else None
            events.append(
                self.segment(
                    turn, [base, base + 1], [base + 2, base + 3], version=f"v{turn % 3}", parent=parent
                )
            )
        return [*events, self.end(turns, reward=reward)]


def end_facts(
    segments: int, *, reward: float | None = 1.0, pending: bool = False,
    status: ev.TrajectoryStatus = "completed", reason: str = "done",
) -> ev.EndFacts:  # fmt: skip
    return ev.EndFacts(
        segment_count=segments, status=status, reason=reason, reward=reward, reward_pending=pending
    )


def group(
    name: str = "g", size: int = 3, *, attempt: int = 0, run: str = RUN, at: int = 0
) -> list[list[ev.Event]]:
    """Whole sessions of one attempt."""
    return [
        Session(name, sample, attempt=attempt, run=run, at=at).whole(reward=float(sample))
        for sample in range(size)
    ]
