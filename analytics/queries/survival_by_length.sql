-- Do long rollouts survive as often as short ones: fates of decided groups by the mean output tokens of their trajectories.
WITH ends AS (
    SELECT group_id, attempt, trajectories, kafka_offset FROM group_completed
    UNION ALL SELECT group_id, attempt, trajectories, kafka_offset FROM group_failed
), lengths AS (
    SELECT group_id, attempt AS last_attempt, list_avg(list_transform(trajectories, lambda t: t.output_tokens)) AS tokens
    FROM ends
    QUALIFY row_number() OVER (PARTITION BY group_id, attempt ORDER BY kafka_offset) = 1
)
SELECT CAST(pow(2, ceil(log2(greatest(tokens, 1)))) AS BIGINT) AS up_to_tokens, count(*) AS groups,
       count(*) FILTER (outcome = 'kept') AS kept, count(*) FILTER (reason = 'stale') AS stale,
       count(*) FILTER (outcome = 'dropped' AND reason <> 'stale') AS dropped_otherwise,
       sum(attempts) - count(*) AS retries, count(*) FILTER (outcome = 'kept') / count(*) AS survival
FROM groups JOIN lengths USING (group_id, last_attempt)
WHERE outcome IS NOT NULL AND reason <> 'run_ended' AND tokens IS NOT NULL
GROUP BY up_to_tokens
ORDER BY up_to_tokens;
