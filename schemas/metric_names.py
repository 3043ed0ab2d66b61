"""Every metric name, once, so that a typo fails the type checker. `staleness/...` names are Dressage's."""

from __future__ import annotations

from typing import Literal

# In Prometheus text, which knows no slash, `staleness/dropped_groups` is `staleness_dropped_groups`.

MetricName = Literal[
    # groups that the window dropped so far
    "staleness/dropped_groups",
    # index of the newest version in the window's order
    "staleness/current_version_index",
    # oldest index that is kept
    "staleness/cutoff_version_index",
    # gaps from the newest version to the versions of a batch's trajectories
    "staleness/version_gap_min",
    "staleness/version_gap_max",
    "staleness/version_gap_mean",
    # distinct real versions per trajectory
    "staleness/version_span_min",
    "staleness/version_span_max",
    "staleness/version_span_mean",
    # refusals by rule 4
    "staleness/partial_rollout_rejected_groups",
    "staleness/partial_rollout_rejected_samples",
]

ProxyMetric = Literal[
    # requests answered, by api and status
    "hoofprint_requests_total",
    # seconds in the engine / until the log acknowledged / in the proxy itself
    "hoofprint_engine_seconds",
    "hoofprint_log_seconds",
    "hoofprint_own_seconds",
    # generations cut by a weight update, and those that went on
    "hoofprint_preemptions_total",
    "hoofprint_resumes_total",
    # those that went on with a field that could not be handed on exactly
    "hoofprint_inexact_resumes_total",
    # generations that went to another engine than their session's last one
    "hoofprint_engine_switches_total",
    # bytes of request and answer bodies
    "hoofprint_bytes_total",
    # refusals by code
    "hoofprint_refusals_total",
    # tokens that a full re-encoding would have changed
    "hoofprint_tito_mismatch_tokens_total",
    # requests waiting at the gate, and in flight
    "hoofprint_gate_waiting",
    "hoofprint_inflight",
    "hoofprint_open_sessions",
    # per engine: 1 for the state it is in, calls in flight, failed catch-ups in a row
    "hoofprint_engine_state",
    "hoofprint_engine_inflight",
    "hoofprint_engine_catch_up_failures",
    # output tokens recorded
    "hoofprint_output_tokens_total",
    # replies without any version, and per-token version lists that did not cover the output
    "hoofprint_unknown_version_total",
    "hoofprint_span_mismatch_total",
    # advisory request fields that were ignored
    "hoofprint_ignored_fields_total",
]

StreamMetric = Literal[
    # records of the segments topic by what became of them: applied, duplicate, void, closed_attempt, other_run, …
    "hoofprint_events_total",
    # the same, the ones worth an eye of their own
    "hoofprint_duplicates_total",
    "hoofprint_void_events_total",
    "hoofprint_closed_attempt_events_total",
    "hoofprint_dead_letters_total",
    # attempts in assembly
    "hoofprint_open_groups",
    "hoofprint_groups_completed_total",
    "hoofprint_groups_failed_total",
    # by outcome and reason
    "hoofprint_verdicts_total",
    "hoofprint_batches_total",
    # records of control.v1 that decided nothing where they stand: late ends, unknown groups, repeated requests, …
    "hoofprint_ignored_control_events_total",
    # versions seen later than a newer one (rule 2)
    "hoofprint_late_sightings_total",
    # admitted groups without a terminal verdict; of these: complete ones that wait for a batch
    "hoofprint_outstanding_groups",
    "hoofprint_pending_groups",
    # mean lag of the newest batch's trajectories: versions that came while they were rolled out, while they waited complete,
    # and between batch and step
    "hoofprint_lag_in_flight",
    "hoofprint_lag_in_queue",
    "hoofprint_lag_at_training",
    # tokens of attempts that ended, and of those that were retries (retry.policy = budget)
    "hoofprint_spent_tokens_total",
    "hoofprint_retried_tokens_total",
    # prompts admitted, and groups that wait to be admitted again
    "hoofprint_admitted_groups_total",
    "hoofprint_waiting_retries",
    # seconds since something moved in the run, and how often that became an alarm
    "hoofprint_no_progress_seconds",
    "hoofprint_alarms_total",
]

ArchiveMetric = Literal[
    # payload files and bytes that the archiver deleted, by why: dropped, trained, no_group, unreferenced
    "hoofprint_payload_files_deleted_total",
    "hoofprint_payload_bytes_deleted_total",
    # what it found in the payload store when it looked last
    "hoofprint_payload_files",
    "hoofprint_payload_bytes",
    # files that could not be deleted or kept in the archive; they are tried again
    "hoofprint_payload_failures_total",
    # records of the segments topic that it deleted from the log, and passes that the broker did not let it do
    "hoofprint_log_records_deleted_total",
    "hoofprint_log_deletion_failures_total",
]
