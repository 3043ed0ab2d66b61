"""The sections of the settings tree: every setting with its default, its bounds and what it is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A table of the TOML file: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _none_by_name(cls, values: Any) -> Any:
        """TOML has no null: "none" stands for it where a setting may be absent."""
        if not isinstance(values, Mapping):
            return values
        optional = {name for name, field in cls.model_fields.items() if field.default is None}
        return {
            name: None if name in optional and value == "none" else value for name, value in values.items()
        }


class RunSettings(Section):
    """The run as a whole."""

    run_id: str = Field(default="run", min_length=1, max_length=80, pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the run; part of every id."""
    directory: str = "runs"
    """Everything of a run lies in <directory>/<run_id>: broker data, payloads, checkpoints, archive, logs, report."""
    seed: int = Field(default=0, ge=0)
    """Seeds the checkpoint, the dataset shuffle and the sampling."""


class KafkaSettings(Section):
    """Where the log is."""

    bootstrap_servers: str = ""
    """Empty: start the embedded Kafka. Set: use that broker, start none."""
    topic_prefix: str = ""
    """Put before every topic name, with a dot; separates runs at one broker."""
    partitions: int = Field(default=4, ge=1, le=1024)
    """Partitions of the data topics (prompts, segments, feedback)."""
    replication_factor: int = Field(default=1, ge=1, le=16)
    """Of every topic; the embedded broker can hold 1."""
    publish_timeout_s: float = Field(default=20.0, gt=0)
    """How long a record may wait for its acknowledgement; then a request gets 503 and a processor ends."""
    linger_ms: float = Field(default=2.0, ge=0)
    """How long a record waits for others to travel with; the proxy has its own, because its answers wait as well."""


class PayloadSettings(Section):
    """The payload store."""

    url: str = ""
    """Any fsspec URL; empty: <run directory>/payloads."""
    fsync: bool = False
    """Sync every payload file to disk before its event is sent (a power loss then loses nothing either)."""
    max_inline_bytes: int = Field(default=786_432, ge=1024)
    """Larger token columns, requests and routed experts travel by reference."""


class WindowSettings(Section):
    """Rules 2 and 3."""

    keep_versions: int = Field(default=2, ge=0)
    """Keep groups of the last N versions; 0 switches the window off."""
    order: Literal["published", "observed"] = "published"
    """Order of versions: by publication, or by first observation (plain Dressage)."""


class StalenessSettings(Section):
    """Rules 4, 5 and 6, and how admission and the window share the work."""

    mode: Literal["drop", "wait", "pace"] = "drop"
    """drop: only the window acts. wait: no group is admitted that could leave the window. pace: at the trainer's rate."""

    partial_rollout: bool = True
    """Whether a trajectory may go on under another version (off: rule 5 refuses it)."""
    max_partial_rollout_preempts: int | None = Field(default=None, ge=0)
    """Distinct versions of a session beyond the first; None: no limit."""
    mask_nonlast_version_tokens: bool = False
    """Rule 6: only tokens of the last version keep their loss."""


class GroupSettings(Section):
    """GRPO groups."""

    size: int = Field(default=8, ge=2, le=1024)
    """Trajectories per prompt."""
    timeout_s: float = Field(default=300.0, gt=0)
    """An attempt that did not complete in this time after its first event fails."""
    max_retries: int = Field(default=2, ge=0)
    """Attempts beyond the first; then dropped(retry_exhausted)."""
    on_stale: Literal["drop", "requeue"] = "drop"
    """What becomes of a stale group; a requeue counts as a retry."""
    min_live_trajectories: int = Field(default=0, ge=0)
    """0: one failed trajectory fails the group. k: it lives as long as k can be good, and k must have tokens to train."""
    drop_zero_variance: bool = False
    """Drop groups whose rewards are all equal (DAPO dynamic sampling)."""
    filter: str = Field(default="", pattern=r"^$|^[\w.]+:\w+$")
    """module:function of a GroupCompleted that returns whether to keep it; must decide by the event alone."""


class RetrySettings(Section):
    """What retries may cost."""

    policy: Literal["always", "budget"] = "always"
    """always: up to group.max_retries. budget: and only while retries stay within their share of all tokens."""
    share: float = Field(default=0.2, gt=0, le=1)
    """With budget: tokens of retries, expected ones included, over all tokens; beyond: dropped(retry_cost)."""


class BatchSettings(Section):
    """What the trainer gets."""

    by: Literal["groups", "sequences"] = "groups"
    """What `size` counts."""
    size: int = Field(default=8, ge=1)
    """Groups (or at least so many sequences) of one optimizer step."""
    sampler: Literal["fifo", "freshest_first"] = "fifo"
    """Which pending groups go first."""
    short_last: bool = True
    """After the dataset's end: emit a last, short batch."""


class FeederSettings(Section):
    """Admission."""

    max_outstanding_groups: int = Field(default=16, ge=1)
    """Admitted groups without a terminal verdict."""
    eta: int | None = Field(default=None, ge=0)
    """If set, at most (eta + v + 1) * batch size groups may be admitted while v versions were trained."""
    oversample: float = Field(default=1.0, ge=1, le=16)
    """With eta or pace: so many times the groups of a batch may run, because filters will drop some of them."""
    dataset: str = ""
    """JSONL file, or module:function giving prompts; empty: the task's own."""
    epochs: int = Field(default=1, ge=0)
    """Passes over the dataset; 0: endless."""
    shuffle: bool = True
    """Shuffle each pass with the run's seed."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """A requested group of which the log shows no session after this time fails (not_started)."""


class WatchdogSettings(Section):
    """Whoever stands still is named."""

    no_progress_s: float = Field(default=300.0, ge=0)
    """Nothing has moved in the run for this time: an Alarm says what is missing, and says it again; 0: off."""
    end_group: bool = False
    """The attempt that is waited for then fails (no_progress) and counts as a failure like any other."""


class MetricsSettings(Section):
    """Prometheus text at http://127.0.0.1:<port>/metrics of each stream process and of the archiver."""

    assembler_port: int = Field(default=0, ge=0, le=65535)
    """0: off. With several assemblers the next free ports above it."""
    controller_port: int = Field(default=0, ge=0, le=65535)
    """0: off."""
    feeder_port: int = Field(default=0, ge=0, le=65535)
    """0: off."""
    archiver_port: int = Field(default=0, ge=0, le=65535)
    """0: off."""


class ProxySettings(Section):
    """The proxy."""

    host: str = "127.0.0.1"
    """Loopback by default: anything else is a decision."""
    port: int = Field(default=0, ge=0, le=65535)
    """0: a free one; `hoofprint up` keeps it in the run's `ports.json`."""
    engines: tuple[str, ...] = ()
    """Base URLs of the engines; `hoofprint up` fills in its own."""
    admin_key: str = ""
    """Opens the admin's routes. Without it they are open to whoever reaches the port, which is then a loopback one only."""
    update_strategy: Literal["abort", "retract"] = "abort"
    """abort: cut by rid and resume from the partial tokens. retract: the engine holds the requests."""
    quiesce_timeout_s: float = Field(default=10.0, gt=0)
    """How long a pause waits for running generations to end."""
    update_timeout_s: float = Field(default=90.0, gt=0)
    """How long an engine may take to load a version; one that takes longer leaves the rotation and the others go on."""
    engine_timeout_s: float = Field(default=300.0, gt=0)
    """One engine call."""
    linger_ms: float = Field(default=0.0, ge=0)
    """`kafka.linger_ms` of this process. What waits for a request under way to the broker travels together in any case."""
    max_sessions: int = Field(default=4096, ge=1)
    """Open sessions; more get 429."""
    max_inflight: int = Field(default=1024, ge=1)
    """Requests in flight; more get 429."""
    max_session_inflight: int = Field(default=64, ge=1)
    """Requests in flight of one session, for its sub-agents; more get 429."""
    max_header_bytes: int = Field(default=32_768, ge=1024)
    """Larger heads get 431."""
    client_stall_s: float = Field(default=60.0, gt=0)
    """A client that leaves its answer unread for so long is cut off."""
    client_send_s: float = Field(default=30.0, gt=0)
    """A client that owes the head of a request, or 64 KiB more of its body, for so long is cut off."""
    max_body_bytes: int = Field(default=16_777_216, ge=1024)
    """Larger bodies get 413."""
    engine_stream_interval: int = Field(default=64, ge=1)
    """Tokens per event of a reply that no client streams. What an engine has not told is lost with it and generated again."""
    engine_stream_interval_streamed: int = Field(default=0, ge=0)
    """The same for replies that a client streams; the first token comes at once in any case. 0: as many as the engine was seen
    to make in the time of a frame."""
    session_idle_s: float = Field(default=900.0, gt=0)
    """Idle sessions expire."""
    session_max_age_s: float = Field(default=86_400.0, gt=0)
    """How far back a session is looked for in the log."""
    context_window: int = Field(default=0, ge=0)
    """Tokens of prompt and reply; 0: what the engine says."""
    stream_frame_s: float = Field(default=0.05, ge=0)
    """Time between two frames of a stream, about; the first token leaves at once. 0: a frame for every token."""
    keepalive_s: float = Field(default=10.0, gt=0)
    """A comment frame on quiet streams."""
    record_routed_experts: Literal["auto", "off"] = "auto"
    """auto: where the engine's model is a mixture of experts and it can say which ones a token was routed to."""
    temperature: float = Field(default=1.0, ge=0)
    """When the request does not say; training needs the temperature of the trainer."""


class EngineSettings(Section):
    """The engine that `hoofprint up` starts when proxy.engines is empty."""

    server: Literal["cpu", "sglang"] = "cpu"
    """cpu: our own. sglang: real SGLang, on CPU (`make sglang-setup`)."""
    model: str = ""
    """Checkpoint directory; empty: the demo's."""
    threads: int = Field(default=1, ge=1)
    """Torch threads."""
    max_running: int = Field(default=128, ge=1)
    """Requests in one decode batch."""
    context_length: int = Field(default=0, ge=0)
    """0: what the checkpoint says."""
    min_step_ms: float = Field(default=0.0, ge=0)
    """Our own: a decode step takes at least this long. Gives a tiny model the pace of a real one."""


class TrainerSettings(Section):
    """The trainer."""

    loss: str = "sat"
    """ppo, gspo, sat or sat_gspo."""
    ratio: Literal["rollout", "prox"] = "rollout"
    """Denominator of ppo's and gspo's ratio: the rollout, or the trainer before the update (SAT: rollout)."""
    eps_low: float = Field(default=0.2, ge=0, le=1)
    """Lower clip."""
    eps_high: float = Field(default=0.2, ge=0)
    """Upper clip."""
    sat_alpha: float = Field(default=0.9, gt=0, le=1)
    """Quantile of |log ratio| that is SAT's bandwidth."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    aggregation: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "prompt_equal"] = (
        "seq_mean_token_mean"
    )
    """How token losses become one number."""
    normalise_std: bool = True
    """Divide advantages by the group's standard deviation."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Adam."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Norm."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the recomputed log-probs: that of the rollout."""
    max_tokens_per_microbatch: int = Field(default=16_384, ge=1)
    """Padded tokens of one forward pass."""
    threads: int = Field(default=1, ge=1)
    """Torch threads."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps of the run."""
    checkpoint_every: int = Field(default=1, ge=1)
    """Durable checkpoint every K steps."""
    keep_checkpoints: int = Field(default=3, ge=2)
    """Published exports and checkpoints kept on disk."""
    publication_patience_s: float = Field(default=30.0, ge=0)
    """How long a new version is offered to a proxy that does not answer; the log has it anyway."""


class RolloutSettings(Section):
    """The rollout workers."""

    workers: int = Field(default=1, ge=1)
    """Processes."""
    agent: str = "rollout.tasks.dial:agent"
    """module:function, run once per trajectory."""
    concurrent_groups: int = Field(default=16, ge=1)
    """Groups one worker runs at a time."""
    trajectory_timeout_s: float = Field(default=240.0, gt=0)
    """One trajectory."""


class ArchiveSettings(Section):
    """The archiver."""

    flush_s: float = Field(default=5.0, gt=0)
    """A snapshot at least this often while events come."""
    flush_rows: int = Field(default=20_000, ge=1)
    """Or after so many events."""
    collect: bool = True
    """Delete payload files that nothing needs any more; what the archive cannot make again is kept in it."""
    collect_every_s: float = Field(default=300.0, gt=0)
    """How often they are looked for."""
    collect_after_s: float = Field(default=3600.0, ge=0)
    """No payload file and no record is deleted before this age. Files that no event names are kept for a day."""
    delete_records: bool = True
    """Delete records of the segments topic that are archived and assembled, and that no session is taken up from any more."""


class AssemblerSettings(Section):
    """The assembler's Faust worker."""

    workers: int = Field(default=1, ge=1)
    """Processes."""
    chunk_records: int = Field(default=128, ge=1, le=10_000)
    """Records handed to the agent at a time."""
