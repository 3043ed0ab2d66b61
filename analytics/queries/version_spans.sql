-- How many versions the tokens of one trajectory came from.
SELECT version_span, count(*) AS trajectories, sum(preemptions) AS preemptions, avg(segments) AS segments,
       avg(output_tokens) AS output_tokens, avg(last_ordinal - first_ordinal) AS ordinals_apart, avg(reward) AS reward
FROM trajectories
WHERE kind = 'train'
GROUP BY version_span
ORDER BY version_span;
