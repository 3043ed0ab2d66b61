-- Which prompts do not come through: fates of decided groups by prompt, over all passes, the worst first.
SELECT prompt_index, count(*) AS groups, count(*) FILTER (outcome = 'kept') AS kept,
       count(*) FILTER (reason = 'stale') AS stale, count(*) FILTER (outcome = 'dropped' AND reason <> 'stale') AS dropped_otherwise,
       sum(attempts) - count(*) AS retries, count(*) FILTER (outcome = 'kept') / count(*) AS survival
FROM groups
WHERE outcome IS NOT NULL AND reason <> 'run_ended'
GROUP BY prompt_index
ORDER BY survival, retries DESC, prompt_index;
