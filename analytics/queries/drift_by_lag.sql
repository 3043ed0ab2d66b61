-- Log-prob drift (trainer minus rollout, nats) of the trained tokens, by their lag.
SELECT lag, count(*) AS tokens, avg(logprob_drift) AS mean, avg(abs(logprob_drift)) AS mean_abs,
       quantile_cont(abs(logprob_drift), 0.99) AS p99_abs, max(abs(logprob_drift)) AS max_abs
FROM token_drift
WHERE lag >= 0
GROUP BY lag
ORDER BY lag;
