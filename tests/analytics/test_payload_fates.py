"""No payload goes that a running system can still ask for, and none stays that it cannot: generated runs, judged by what
the trainer and the controller would read, not by the rule's own words. Topics are read in any order against each other."""

from __future__ import annotations

import random
from collections import defaultdict, deque

import msgspec
from analytics_events import AT, RUN, admitted, published
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.payload_fates import PayloadFates
from analytics.retention import Ages, spent
from journal.payloads import StoredPayload, place
from schemas import events as ev
from schemas import ids
from schemas.settings import load
from schemas.topics import TOPIC_OF
from streams.control_fold import fold
from streams.control_state import ControlState

KEEP = 2
FOREVER = 10**18


def uri(group: str, attempt: int) -> str:
    return f"{RUN}/{place(group, attempt)}/digest"


class World:
    """A run in miniature: a controller that folds, a trainer that keeps KEEP checkpoints, a store, an archiver behind."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.state = ControlState(RUN)
        self.offset = 0
        self.files: set[str] = set()
        self.batches: dict[int, ev.TrainBatch] = {}
        self.done = 0
        self.asked: set[tuple[int, str]] = set()
        self.branch = ""
        self.labels = ["v0"]
        self.every = 2
        self.shelf = [0]  # the initial weights are always there
        self.unread: dict[str, deque[ev.Event]] = defaultdict(deque)
        self.fates = PayloadFates(RUN, KEEP)
        chosen = load(
            sets=(
                f"run.run_id={RUN}", "batch.size=2", "window.keep_versions=2", "group.max_retries=1",
                f"group.on_stale={rng.choice(['drop', 'requeue'])}",
            )
        )  # fmt: skip
        self.write(
            ev.RunConfigured(
                run_id=RUN, occurred_at=AT, settings=chosen.to_json(), settings_digest="d", software="t"
            )
        )

    def write(self, event: ev.Event) -> None:
        effects = fold(self.state, self.offset, ev.identified(event))
        self.offset += 1
        for one in (event, *effects):
            self.unread[TOPIC_OF[type(one)].name].append(one)
            if isinstance(one, ev.TrainBatch):
                self.batches[one.step] = one
                self.wants(one)

    def wants(self, batch: ev.TrainBatch) -> None:
        missing = [
            group.group_id for group in batch.groups if uri(group.group_id, group.attempt) not in self.files
        ]
        assert not missing, f"step {batch.step} has lost {missing}"

    def act(self) -> None:
        self.rng.choice(
            [self.admit, self.admit, self.end_one, self.end_one, self.end_one, self.train, self.train, self.restart,
             self.roll_back, self.read, self.read, self.collect]
        )()  # fmt: skip

    def admit(self) -> None:
        if self.state.retrying:
            group, attempt = next(iter(self.state.retrying.items()))
            self.write(admitted(group, attempt))
        else:
            self.write(admitted(ids.group_id(RUN, 0, self.offset)))

    def end_one(self) -> None:
        if not self.state.running:
            return
        group, attempt = self.rng.choice(sorted(self.state.running.items()))
        self.files.add(uri(group, attempt))
        if self.rng.random() < 0.2:
            self.write(
                ev.GroupFailed(run_id=RUN, occurred_at=AT, group_id=group, attempt=attempt, reason="timeout")
            )
            return
        version = self.labels[-min(len(self.labels), self.rng.choice([1, 1, 2, 4]))]
        facts = ev.TrajectoryFacts(
            parent_traj_id=group, sample_index=0, version=version, versions=(version,), reward=1.0, status="completed",
            reason="done", segments=1, sequences=1, output_tokens=1, context_tokens=1, preemptions=0, abandoned_segments=0,
            tokens_digest="", started_at=AT, ended_at=AT,
        )  # fmt: skip
        ref = ev.PayloadRef(uri(group, attempt), "digest", 1, "c")
        self.write(
            ev.GroupCompleted(
                run_id=RUN, occurred_at=AT, group_id=group, attempt=attempt, payload=ref, sequences=1, trainable_tokens=1,
                trajectories=(facts,),
            )
        )  # fmt: skip

    def train(self) -> None:
        """Ask for the next batch; with it, a step, and a checkpoint now and then."""
        step = self.done + 1
        if step not in self.batches:
            if (step, self.branch) not in self.asked:
                self.asked.add((step, self.branch))
                self.write(
                    ev.BatchRequested(
                        run_id=RUN,
                        occurred_at=AT,
                        step=step,
                        branch=self.branch,
                        batch_id=ids.batch_id(RUN, step, self.branch),
                    )
                )
            return
        self.wants(self.batches[step])
        self.done = step
        if step % self.every == 0:
            self.shelf = [0, *[at for at in self.shelf if at][-KEEP + 1 :], step]
        self.write(
            ev.StepCompleted(
                run_id=RUN, occurred_at=AT, step=step, branch=self.branch, batch_id=self.batches[step].batch_id, digest="d",
                checkpoint_step=max(self.shelf), metrics={},
            )
        )  # fmt: skip
        self.labels.append(f"v{step}{self.branch}")
        self.write(published(self.labels[-1], step))

    def restart(self) -> None:
        """Any checkpoint on disk may be the newest that can be read. One with fewer before it has the initial weights."""
        for step in range(self.loaded() + 1, self.done + 1):
            self.wants(self.batches[step])

    def loaded(self) -> int:
        kept = [at for at in self.shelf if at]
        few = len(kept) < KEEP and (not self.branch or not kept)
        return self.rng.choice(self.shelf if few else kept)

    def roll_back(self) -> None:
        """The steps behind a checkpoint were trained again, and one of them gave another digest."""
        if self.rng.random() < 0.7 or self.done == 0:
            return
        to_step = self.rng.randint(self.loaded(), self.done)
        self.branch = f"b{self.offset}"
        self.done = to_step
        self.shelf = [at for at in self.shelf if at <= to_step]
        self.every = self.rng.randint(1, 3)
        self.write(ev.RolledBack(run_id=RUN, occurred_at=AT, to_step=to_step, branch=self.branch, reason="t"))

    def read(self) -> None:
        topic = self.rng.choice(sorted(self.unread))
        for _ in range(self.rng.randint(0, len(self.unread[topic]))):
            self.fates.told(self.unread[topic].popleft())

    def read_all(self) -> None:
        for waiting in self.unread.values():
            while waiting:
                self.fates.told(waiting.popleft())

    def collect(self) -> None:
        stored = [StoredPayload(one, 1, 0) for one in sorted(self.files)]
        gone = list(spent(stored, self.fates.fate, self.fates.covered_step, Ages(0, FOREVER), AT))
        self.files -= {payload.uri for payload in gone}
        self.fates.forget_all_but(StoredPayload(one, 1, 0) for one in self.files)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 120))
def test_what_is_needed_stays_and_what_is_not_goes(seed: int, actions: int) -> None:
    world = World(random.Random(seed))
    for _ in range(actions):
        world.act()
    world.restart()
    world.write(ev.RunEnded(run_id=RUN, occurred_at=AT, reason="done"))
    world.read_all()
    world.collect()
    covered = world.fates.covered_step or 0
    assert world.files <= {
        uri(group.group_id, group.attempt)
        for step, batch in world.batches.items()
        if step > covered
        for group in batch.groups
    }


def test_files_of_a_long_run_go_while_it_lasts() -> None:
    """With a seed that trains: what is left at the end is what the kept checkpoints do not cover."""
    world = World(random.Random(1))
    most = 0
    for _ in range(3000):
        world.act()
        world.read_all()
        world.collect()
        most = max(most, len(world.files))
    assert world.done > 100
    assert most < 40
    assert len(world.fates._groups) <= len(world.files) + world.state.open_groups + 1


def test_an_attempt_that_was_kept_stays_until_its_batch_is_read() -> None:
    fates = PayloadFates(RUN, 1)
    file = StoredPayload(uri("g", 0), 1, 0)
    kept = ev.Verdict(
        run_id=RUN,
        occurred_at=AT,
        cause_offset=1,
        index=0,
        group_id="g",
        attempt=0,
        outcome="kept",
        reason="trained",
    )
    fates.told(kept)
    fates.told(admitted("g"))
    assert fates.fate(file) == "open"
    fates.told(admitted("g", 1))
    assert fates.fate(StoredPayload(uri("g", 1), 1, 0)) == "over"
    fates.told(msgspec.structs.replace(kept, outcome="dropped"))
    assert fates.fate(file) == "over"
