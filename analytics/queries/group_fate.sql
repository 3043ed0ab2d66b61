-- What became of the admitted groups: outcome and reason, how many attempts it took, how old they were.
SELECT coalesce(outcome, 'open') AS outcome, reason, count(*) AS groups, sum(attempts) AS attempts,
       sum(len(retry_reasons)) AS retries, avg(gap_mean) AS gap_mean, max(gap_max) AS gap_max,
       median(date_diff('millisecond', admitted_at, decided_at)) / 1000 AS median_seconds
FROM groups
GROUP BY ALL
ORDER BY groups DESC, outcome, reason;
