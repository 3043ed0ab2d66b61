"""State of the control plane: what the fold of `control.v1` remembers between two records.

Everything in it comes from the log (settings too: from the run's first `RunConfigured`), so that a snapshot taken after
any record and the fold from the start are the same state, byte for byte.

Invariants:
* a group is in exactly one of `running` (an attempt is rolled out), `retrying` (a retry verdict was given, its attempt is not
  admitted yet), `pending` (complete, waits for a batch) and `finished` (has its terminal verdict);
* `pending` is in completion order, and no group in it is outside the window;
* `void` holds the ids of ignored events alone (accepted ones are known by what they changed), so that it stays small;
* `costs` is kept with `retry.policy = budget` alone;
* `requested` has the steps of each branch for which a batch was asked;
* `request` is None or the one open request, on the branch that survives.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec

from schemas.errors import CorruptPayload, IncompatibleEvent
from schemas.events import BatchGroup, RunConfigured
from schemas.index_set import GroupSet, IndexSet
from schemas.window import VersionWindow, WindowOrder
from streams.retry_cost import RetryCosts

DIGEST_SIZE = hashlib.sha256().digest_size
AtLeast0 = Annotated[int, msgspec.Meta(ge=0)]
AtLeast1 = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class WindowChoice(msgspec.Struct, frozen=True):
    """Settings `window.*`."""

    keep_versions: AtLeast0
    order: WindowOrder


class GroupChoice(msgspec.Struct, frozen=True):
    """Settings `group.*` that decide fates."""

    max_retries: AtLeast0
    on_stale: Literal["drop", "requeue"]
    drop_zero_variance: bool
    min_live_trajectories: AtLeast0 = 0
    filter: str = ""


class BatchChoice(msgspec.Struct, frozen=True):
    """Settings `batch.*`."""

    by: Literal["groups", "sequences"]
    size: AtLeast1
    sampler: Literal["fifo", "freshest_first"]
    short_last: bool


class RetryChoice(msgspec.Struct, frozen=True):
    """Settings `retry.*`."""

    policy: Literal["always", "budget"] = "always"
    share: Share = 0.2


class FoldSettings(msgspec.Struct, frozen=True):
    """The part of a run's settings that the fold reads; other keys of the recorded JSON have no say here.

    Read from the JSON directly and not through `Settings`: a log must fold the same after a setting of some other part
    came or went, and one from before a setting came folds as it did then.
    """

    window: WindowChoice
    group: GroupChoice
    batch: BatchChoice
    retry: RetryChoice = RetryChoice()


def fold_settings(event: RunConfigured) -> FoldSettings:
    """The fold's settings in a run's configuration. Raises IncompatibleEvent."""
    try:
        return msgspec.json.decode(event.settings, type=FoldSettings)
    except msgspec.MsgspecError as wrong:
        raise IncompatibleEvent(
            f"RunConfigured carries settings that do not fold: {wrong}", event="RunConfigured"
        ) from wrong


class PendingGroup(msgspec.Struct, frozen=True):
    """A complete group that waits for a batch. `versions`: of its trajectories, "" where none is real."""

    group: BatchGroup
    versions: tuple[str, ...]
    completed_offset: int


class OpenRequest(msgspec.Struct, frozen=True):
    """The batch that the trainer waits for."""

    batch_id: str
    step: int


class ControlState(msgspec.Struct):
    """What the fold remembers. `next_offset`: offset of the first record of `control.v1` that is not in it; `last_id`: the
    event in front of that ("" if it was none)."""

    run_id: str
    next_offset: int = 0
    last_id: str = ""
    policy_id: str = "main"
    settings: FoldSettings | None = None
    window: VersionWindow = msgspec.field(default_factory=lambda: VersionWindow(0))
    running: dict[str, int] = {}
    retrying: dict[str, int] = {}
    pending: dict[str, PendingGroup] = {}
    pending_sequences: int = 0
    finished: GroupSet = msgspec.field(default_factory=lambda: GroupSet(""))
    request: OpenRequest | None = None
    requested: dict[str, IndexSet] = {}
    branch: str = ""
    branches: dict[str, None] = {}
    steps: int = 0
    dataset_ended: bool = False
    end_reason: str | None = None
    costs: RetryCosts = msgspec.field(default_factory=RetryCosts)
    void: dict[str, None] = {}
    counters: dict[str, int] = {}

    def __post_init__(self) -> None:
        self.finished.run_id = self.run_id

    @property
    def open_groups(self) -> int:
        """Admitted groups without a terminal verdict."""
        return len(self.running) + len(self.retrying) + len(self.pending)

    def count(self, name: str, by: int = 1) -> None:
        """Count something that is no effect: ignored events, verdicts by outcome, late sightings."""
        self.counters[name] = self.counters.get(name, 0) + by

    def ignore(self, name: str, event_id: str) -> None:
        """An event had no effect where it stands. Its repetition must have none either, though it might fit by then."""
        self.count(name)
        if event_id:
            self.void[event_id] = None

    def to_bytes(self) -> bytes:
        """Snapshot: sha256 of the body, then the body. Equal states give equal bytes."""
        body = msgspec.msgpack.encode(self)
        return hashlib.sha256(body).digest() + body

    @classmethod
    def from_bytes(cls, raw: bytes) -> ControlState:
        """The state of a snapshot. Raises CorruptPayload when the bytes are not what was written."""
        digest, body = raw[:DIGEST_SIZE], raw[DIGEST_SIZE:]
        if hashlib.sha256(body).digest() != digest:
            raise CorruptPayload("the snapshot's digest does not fit its bytes", size=len(raw))
        try:
            return msgspec.msgpack.decode(body, type=cls)
        except msgspec.MsgspecError as wrong:
            raise CorruptPayload(f"the snapshot is of another layout: {wrong}", size=len(raw)) from wrong

    def digest(self) -> str:
        """sha256 of the snapshot's body, in hex."""
        return self.to_bytes()[:DIGEST_SIZE].hex()
