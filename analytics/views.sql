-- Relations of the domain over the event views. Vocabulary: docs/glossary.md.

-- Records of a session that count for nothing: those of a lower epoch that come after a claim, and all that came before a
-- restarting one (an event above the current epoch counts as a claim). Decided before repeats are looked at. Records of a
-- completed attempt that are newer than its completion (a worker that died afterwards and began again) changed nothing.
CREATE TEMP TABLE void_session_events AS
WITH ends AS (
    SELECT group_id, attempt, occurred_at, kafka_offset, true AS completed FROM group_completed
    UNION ALL SELECT group_id, attempt, occurred_at, kafka_offset, false FROM group_failed
), closed AS (
    SELECT group_id, attempt, occurred_at AS closed_at FROM ends
    QUALIFY row_number() OVER (PARTITION BY group_id, attempt ORDER BY kafka_offset) = 1 AND completed
), placed AS (
    SELECT events."partition", events.kafka_offset, event_type, session_id, epoch, restart,
           events.occurred_at > coalesce(closed_at, events.occurred_at) AS late
    FROM log_segments AS events LEFT JOIN closed USING (group_id, attempt)
    WHERE event_type <> 'RewardAssigned'
), owned AS (
    SELECT *, max(epoch) OVER (PARTITION BY "partition", session_id ORDER BY kafka_offset
                               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS current_epoch
    FROM placed WHERE NOT late
), restarted AS (
    SELECT "partition", session_id, max(kafka_offset) AS restart_offset
    FROM owned
    WHERE event_type = 'SessionClaimed' AND restart AND epoch > coalesce(current_epoch, -1)
    GROUP BY ALL
)
SELECT owned."partition", owned.kafka_offset
FROM owned LEFT JOIN restarted USING ("partition", session_id)
WHERE owned.epoch < coalesce(current_epoch, owned.epoch) OR owned.kafka_offset < coalesce(restart_offset, -1)
UNION ALL SELECT "partition", kafka_offset FROM placed WHERE late;

-- Versions by ordinal: the rank of their first publication.
CREATE VIEW versions AS
SELECT row_number() OVER (PARTITION BY policy_id ORDER BY kafka_offset) - 1 AS ordinal, policy_id, version, step, branch,
       occurred_at AS published_at, kafka_offset
FROM (SELECT * FROM policy_published QUALIFY row_number() OVER (PARTITION BY policy_id, version ORDER BY kafka_offset) = 1);

-- The end of each trajectory, from an event of its own or from its last segment; the first one counts.
CREATE VIEW trajectory_ends AS
SELECT parent_traj_id, "end".segment_count, "end".status, "end".reason, "end".reward, "end".reward_pending,
       "end".components, occurred_at AS ended_at
FROM (
    SELECT parent_traj_id, "end", occurred_at, "partition", kafka_offset FROM token_segments WHERE "end" IS NOT NULL
    UNION ALL
    SELECT parent_traj_id, "end", occurred_at, "partition", kafka_offset FROM trajectory_ended
) ANTI JOIN void_session_events USING ("partition", kafka_offset)
QUALIFY row_number() OVER (PARTITION BY parent_traj_id ORDER BY kafka_offset) = 1;

-- Segments that count, in each session's valid history up to its end. `abandoned`: the same request came again after this
-- answer was done, so that the client never had it.
CREATE VIEW live_segments AS
SELECT *,
       coalesce(max(received_at) OVER (
           PARTITION BY parent_traj_id, parent_segment_index, request_digest ORDER BY segment_index
           ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) >= done_at, false) AS abandoned
FROM (
    SELECT token_segments.* FROM token_segments ANTI JOIN void_session_events USING ("partition", kafka_offset)
    LEFT JOIN trajectory_ends USING (parent_traj_id)
    WHERE segment_count IS NULL OR segment_index < segment_count
    QUALIFY row_number() OVER (PARTITION BY parent_traj_id, segment_index ORDER BY kafka_offset) = 1
);

-- One row per version span of every live segment.
CREATE VIEW version_spans AS
SELECT kind, parent_traj_id, group_id, attempt, sample_index, segment_index, lineage_id, span_index, span.version AS version,
       versions.ordinal, span."start" AS "start", span."stop" AS "stop", span."stop" - span."start" AS tokens, abandoned
FROM (
    SELECT *, unnest(spans) AS span, generate_subscripts(spans, 1) - 1 AS span_index FROM live_segments
) AS spanned
LEFT JOIN versions ON versions.version = span.version AND versions.policy_id = spanned.policy_id;

-- One row per trajectory with a live segment or an end. Rewards: the end's, else the first one assigned.
CREATE VIEW trajectories AS
WITH turns AS (
    SELECT parent_traj_id, any_value(kind) AS kind, any_value(group_id) AS group_id, any_value(attempt) AS attempt,
           any_value(sample_index) AS sample_index, count(*) AS segments, count(*) FILTER (abandoned) AS abandoned_segments,
           count(DISTINCT lineage_id) AS lineages, sum(len(output_ids)) AS output_tokens, sum(len(context_ids)) AS context_tokens,
           sum(preemptions) AS preemptions, min(received_at) AS started_at, max(done_at) AS done_at
    FROM live_segments GROUP BY parent_traj_id
), spanned AS (
    SELECT parent_traj_id, count(DISTINCT version) AS version_span, min(ordinal) AS first_ordinal, max(ordinal) AS last_ordinal
    FROM version_spans WHERE lower(trim(version)) NOT IN ('', '-1', 'unknown', 'none') GROUP BY parent_traj_id
), assigned AS (
    SELECT parent_traj_id, arg_min(reward, kafka_offset) AS reward FROM reward_assigned GROUP BY parent_traj_id
)
SELECT parent_traj_id, turns.* EXCLUDE (parent_traj_id), ends.status, ends.reason,
       CASE WHEN ends.reward_pending THEN assigned.reward ELSE ends.reward END AS reward, ends.ended_at,
       coalesce(spanned.version_span, 0) AS version_span, spanned.first_ordinal, spanned.last_ordinal
FROM turns
FULL JOIN trajectory_ends AS ends USING (parent_traj_id)
LEFT JOIN spanned USING (parent_traj_id)
LEFT JOIN assigned USING (parent_traj_id);

-- One row per admitted group: its attempts and what became of it (NULL outcome: still open).
CREATE VIEW groups AS
WITH admitted AS (
    SELECT group_id, any_value(kind) AS kind, any_value(prompt_index) AS prompt_index, any_value(dataset_epoch) AS dataset_epoch,
           max(group_size) AS group_size, count(DISTINCT attempt) AS attempts, min(occurred_at) AS admitted_at
    FROM group_admitted GROUP BY group_id
), terminal AS (
    SELECT * FROM verdicts WHERE outcome <> 'retry'
    QUALIFY row_number() OVER (PARTITION BY group_id ORDER BY kafka_offset) = 1
), retried AS (
    SELECT group_id, list(reason ORDER BY kafka_offset) AS retry_reasons FROM verdicts WHERE outcome = 'retry' GROUP BY group_id
)
SELECT admitted.*, terminal.outcome, terminal.reason, terminal.attempt AS last_attempt, terminal.batch_id, terminal.gap_mean,
       terminal.gap_max, coalesce(retry_reasons, []) AS retry_reasons, terminal.occurred_at AS decided_at
FROM admitted LEFT JOIN terminal USING (group_id) LEFT JOIN retried USING (group_id);

-- One row per optimizer step's batch.
CREATE VIEW batches AS
SELECT step, branch, batch_id, len(train_batches.groups) AS group_count,
       list_sum(list_transform(train_batches.groups, lambda g: g.sequences)) AS sequences,
       list_sum(list_transform(train_batches.groups, lambda g: g.trainable_tokens)) AS trainable_tokens,
       current_version, cutoff_version, short, cause_offset, occurred_at AS emitted_at
FROM train_batches;

-- One row per trained token: lag in ordinals, drift in nats. A lag below 0 is none: the token's version was never
-- published, or a rollback gave it up later.
CREATE VIEW token_drift AS
SELECT step, batch_id, group_id, attempt, parent_traj_id, lineage_id, lag, trainer_logprob, rollout_logprob,
       trainer_logprob - rollout_logprob AS logprob_drift
FROM (
    SELECT step, batch_id, group_id, attempt, parent_traj_id, lineage_id, unnest(lag) AS lag,
           unnest(trainer_logprobs) AS trainer_logprob, unnest(rollout_logprobs) AS rollout_logprob
    FROM sequence_feedback
);
