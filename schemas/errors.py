"""One error tree. Every error has a stable `code` (snake_case), data in `detail`, and an HTTP status where it crosses HTTP.

HoofprintError
├── ConfigError
├── SchemaError                      a record itself is wrong: dead letter, never retried
│   ├── UnknownEvent
│   ├── IncompatibleEvent
│   └── CorruptPayload
├── RolloutError                     crosses HTTP to the agent
│   ├── BadRequest (400)             names the field
│   ├── Unauthorized (401)
│   ├── UnknownSession (404)
│   ├── StalenessExceeded (502)      rule 4
│   ├── TrajectoryVersionChanged (502)  rule 5
│   ├── GenerationPreempted (502)
│   ├── ContextOverflow (413)
│   ├── SessionConflict (409)
│   ├── TrajectoryClosed (409)       finalized
│   ├── TrajectoryGone (410)         expired, or its attempt was closed
│   ├── NotQuiesced (409)            generations still run: no weight update, no pause
│   ├── VersionConflict (409)        a label with another checkpoint, or an older one
│   ├── VersionRefused (422)         no engine can load the checkpoint
│   ├── UnknownEngine (404)
│   ├── LastEngine (409)             draining it would leave none
│   └── Overloaded (429 or 503)      Retry-After
├── UpstreamError(retryable)
│   ├── EngineUnavailable (503)
│   ├── EngineTimeout (504)
│   └── EngineRejected (4xx passed through)
├── TransportError(retryable)
│   ├── PublishFailed (503)
│   └── PublishTimeout (503)         outcome unknown
├── StoreError (503)                 payload store: disk full, unreachable
├── ArchiveError
│   ├── SnapshotConflict
│   └── ReplayGap
└── InvariantBroken                  a law of the design did not hold
"""

from __future__ import annotations

from typing import ClassVar


class HoofprintError(Exception):
    """Root of the tree. `detail` holds JSON-ready facts; the message is for people."""

    code: ClassVar[str] = "hoofprint_error"
    http_status: int = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **detail: object) -> None:
        super().__init__(message)
        self.message = message
        self.detail: dict[str, object] = detail


class ConfigError(HoofprintError):
    """A setting is wrong, unknown or inconsistent."""

    code = "config_error"
    http_status = 400


class SchemaError(HoofprintError):
    """A record cannot be used as it is: dead letter, never retried."""

    code = "schema_error"
    http_status = 400


class UnknownEvent(SchemaError):
    """No schema of ours has this fingerprint."""

    code = "unknown_event"


class IncompatibleEvent(SchemaError):
    """The schema is known, but the bytes do not decode into the event class."""

    code = "incompatible_event"


class CorruptPayload(SchemaError):
    """The payload's bytes do not have the recorded digest or size."""

    code = "corrupt_payload"


class RolloutError(HoofprintError):
    """A request of an agent cannot be served."""

    code = "rollout_error"
    http_status = 400


class BadRequest(RolloutError):
    """Malformed request; `detail["field"]` names the field."""

    code = "invalid_request"


class Unauthorized(RolloutError):
    """No key, or a key that does not fit the session."""

    code = "unauthorized"
    http_status = 401


class UnknownSession(RolloutError):
    """No such session at this proxy nor in the log."""

    code = "unknown_session"
    http_status = 404


class StalenessExceeded(RolloutError):
    """Rule 4: the session would span more versions than allowed."""

    code = "partial_rollout_staleness_exceeded"
    http_status = 502


class TrajectoryVersionChanged(RolloutError):
    """Rule 5: non-partial mode, and the trajectory would go on under another version."""

    code = "trajectory_version_changed"
    http_status = 502


class GenerationPreempted(RolloutError):
    """A weight update cut the generation and it may not be resumed."""

    code = "generation_preempted"
    http_status = 502


class ContextOverflow(RolloutError):
    """The prompt fills the context window."""

    code = "context_overflow"
    http_status = 413


class SessionConflict(RolloutError):
    """Another call holds the session, or another replica claimed it."""

    code = "session_conflict"
    http_status = 409


class TrajectoryClosed(RolloutError):
    """The trajectory was finalized."""

    code = "trajectory_closed"
    http_status = 409


class TrajectoryGone(RolloutError):
    """The session expired, or its group attempt was closed."""

    code = "trajectory_gone"
    http_status = 410


class NotQuiesced(RolloutError):
    """Generations still run after `proxy.quiesce_timeout_s`: `running` names their engine calls."""

    code = "not_quiesced"
    http_status = 409


class VersionConflict(RolloutError):
    """A published label came with another checkpoint, or is older than the active one."""

    code = "version_conflict"
    http_status = 409


class VersionRefused(RolloutError):
    """Every engine refused the checkpoint: `failed` says why. The old version goes on."""

    code = "version_refused"
    http_status = 422


class UnknownEngine(RolloutError):
    """No engine of `proxy.engines` has this id."""

    code = "unknown_engine"
    http_status = 404


class LastEngine(RolloutError):
    """No other engine could take over what the drained one runs."""

    code = "last_engine"
    http_status = 409


class Overloaded(RolloutError):
    """A limit is reached; `retry_after_s` goes into Retry-After."""

    code = "overloaded"
    http_status = 429

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, http_status: int = 429, **detail: object
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s, **detail)
        self.retry_after_s = retry_after_s
        self.http_status = http_status


class UpstreamError(HoofprintError):
    """An engine did not do its part."""

    code = "upstream_error"
    http_status = 503
    retryable = True


class EngineUnavailable(UpstreamError):
    """No engine of a permitted version can be reached."""

    code = "engine_unavailable"


class EngineTimeout(UpstreamError):
    """The engine did not answer in time."""

    code = "engine_timeout"
    http_status = 504


class EngineRejected(UpstreamError):
    """The engine refused the request; its 4xx is passed through."""

    code = "engine_rejected"
    retryable = False

    def __init__(self, message: str, *, http_status: int, **detail: object) -> None:
        super().__init__(message, **detail)
        self.http_status = http_status


class TransportError(HoofprintError):
    """Kafka did not do its part."""

    code = "transport_error"
    http_status = 503
    retryable = True


class PublishFailed(TransportError):
    """The broker refused the record: it is certainly not in the log."""

    code = "publish_failed"


class PublishTimeout(TransportError):
    """No acknowledgement in time: the record may or may not be in the log."""

    code = "publish_timeout"


class StoreError(HoofprintError):
    """The payload store cannot be written or read (disk full, unreachable)."""

    code = "store_error"
    http_status = 503
    retryable = True


class ArchiveError(HoofprintError):
    """The archive cannot be written or read."""

    code = "archive_error"


class SnapshotConflict(ArchiveError):
    """Another writer committed to the same table."""

    code = "snapshot_conflict"


class ReplayGap(ArchiveError):
    """An offset is missing: `topic, partition, expected, found`."""

    code = "replay_gap"


class InvariantBroken(HoofprintError):
    """A law of the design did not hold; `detail` says which and where."""

    code = "invariant_broken"
