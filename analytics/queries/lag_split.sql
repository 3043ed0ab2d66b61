-- Where the lag of trained tokens came from, in versions: published while their group was still being rolled out (in flight),
-- while it waited complete for its batch (in queue), and between the batch and the step that trained it (at training).
WITH tokens AS (
    SELECT step, batch_id, group_id, attempt, policy_id, version, unnest(lag) AS lag FROM sequence_feedback
), completed AS (
    SELECT group_id, attempt, ordinal AS newest_at_completion
    FROM group_completed ASOF LEFT JOIN versions
      ON versions.policy_id = group_completed.policy_id AND group_completed.kafka_offset >= versions.kafka_offset
), emitted AS (
    SELECT batch_id, ordinal AS newest_at_emission
    FROM train_batches ASOF LEFT JOIN versions
      ON versions.policy_id = train_batches.policy_id AND train_batches.cause_offset >= versions.kafka_offset
), placed AS (
    SELECT tokens.step, lag, versions.ordinal AS trained_on, coalesce(newest_at_completion, 0) AS newest_at_completion,
           coalesce(newest_at_emission, 0) AS newest_at_emission
    FROM tokens
    JOIN versions ON versions.version = tokens.version AND versions.policy_id = tokens.policy_id
    JOIN completed USING (group_id, attempt)
    JOIN emitted USING (batch_id)
    WHERE lag >= 0
)
SELECT step, count(*) AS tokens, avg(lag) AS lag, avg(newest_at_completion - (trained_on - lag)) AS in_flight,
       avg(newest_at_emission - newest_at_completion) AS in_queue, avg(trained_on - newest_at_emission) AS at_training
FROM placed
GROUP BY step
ORDER BY step;
