"""Numbers of the proxy: Prometheus series named in `schemas.metric_names`, and the same as plain counts for `/v1/stats`."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from schemas.metric_names import ProxyMetric

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

_FIELDS = 64
"""Clients choose the names: so many become label values, the rest is `other`."""


class Metrics:
    """One process's metrics; `counts` are what `/v1/stats` says."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.counts: Tally[str] = Tally()
        self._requests = self._counter(
            "hoofprint_requests_total", "Requests by API and status", "api", "status"
        )
        self._refusals = self._counter("hoofprint_refusals_total", "Refused requests by error code", "code")
        self._preemptions = self._counter(
            "hoofprint_preemptions_total", "Generations cut by a weight update, or held over one"
        )
        self._resumes = self._counter("hoofprint_resumes_total", "Generations that went on")
        self._inexact = self._counter(
            "hoofprint_inexact_resumes_total", "Generations with a field that no resume can hand on", "field"
        )
        self._switches = self._counter(
            "hoofprint_engine_switches_total", "Generations that went to another engine than their session's"
        )
        transferred = self._counter("hoofprint_bytes_total", "Bytes of bodies, by direction", "direction")
        self._received, self._sent = transferred.labels("received"), transferred.labels("sent")
        self._mismatches = self._counter(
            "hoofprint_tito_mismatch_tokens_total", "Tokens that a full re-encoding would have changed"
        )
        self._tokens = self._counter("hoofprint_output_tokens_total", "Output tokens recorded")
        self._unknown = self._counter("hoofprint_unknown_version_total", "Replies without any version")
        self._span_mismatch = self._counter(
            "hoofprint_span_mismatch_total", "Version lists that did not cover the output"
        )
        self._ignored = self._counter(
            "hoofprint_ignored_fields_total", "Advisory request fields ignored", "field"
        )
        self._engine = self._seconds("hoofprint_engine_seconds", "Seconds in the engine")
        self._log = self._seconds("hoofprint_log_seconds", "Seconds until the log acknowledged")
        self._own = self._seconds("hoofprint_own_seconds", "Seconds in the proxy itself")
        self.gauges: dict[str, Gauge] = {
            name: self._gauge(name, text)
            for name, text in (
                ("hoofprint_gate_waiting", "Generations that wait at the gate"),
                ("hoofprint_inflight", "Requests in flight"),
                ("hoofprint_open_sessions", "Open sessions"),
            )
        }
        self._state = self._gauge("hoofprint_engine_state", "1: the state it is in", "engine", "state")
        self._calls = self._gauge("hoofprint_engine_inflight", "Calls in flight", "engine")
        self._behind = self._gauge(
            "hoofprint_engine_catch_up_failures", "Failed catch-ups in a row", "engine"
        )
        self._ignored_names: set[str] = set()
        self._by_request: dict[tuple[str, int], Any] = {}

    def _counter(self, name: ProxyMetric, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: Any, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _seconds(self, name: ProxyMetric, text: str) -> Histogram:
        return Histogram(name, text, registry=self.registry, buckets=_SECONDS)

    def request(self, api: str, status: int) -> None:
        """One request was answered."""
        child = self._by_request.get((api, status))
        if child is None:
            child = self._by_request[api, status] = self._requests.labels(api, str(status))
        child.inc()
        self.counts["requests"] += 1

    def refusal(self, code: str) -> None:
        """One request was refused."""
        self._refusals.labels(code).inc()
        self.counts["refusals"] += 1
        self.counts[f"refusals.{code}"] += 1

    def transferred(self, received: int, sent: int) -> None:
        """Bytes of one call's bodies."""
        self._received.inc(received)
        self._sent.inc(sent)

    def switched(self) -> None:
        """A session's tokens come from another engine than before."""
        self._switches.inc()
        self.counts["engine_switches"] += 1

    def preempted(self, times: int) -> None:
        """An engine call ended; how often an update cut it, or its engine held it over one."""
        if times:
            self._preemptions.inc(times)
            self.counts["preemptions"] += times

    def inexact(self, field: str) -> None:
        """A generation ended for which a resume could not hand on a field exactly."""
        self._inexact.labels(field).inc()
        self.counts["inexact_resumes"] += 1

    def resumed(self) -> None:
        """A generation goes on from its partial tokens."""
        self._resumes.inc()
        self.counts["resumes"] += 1

    def recorded(self, tokens: int, mismatch_tokens: int, *, unknown: bool, span_mismatches: int) -> None:
        """A segment is in the log."""
        self._tokens.inc(tokens)
        self.counts["segments"] += 1
        self.counts["output_tokens"] += tokens
        if mismatch_tokens:
            self._mismatches.inc(mismatch_tokens)
            self.counts["tito_mismatch_tokens"] += mismatch_tokens
        if unknown:
            self._unknown.inc()
            self.counts["unknown_versions"] += 1
        if span_mismatches:
            self._span_mismatch.inc(span_mismatches)

    def ignored(self, field: str) -> None:
        """An advisory or unknown field came with a request."""
        known = field in self._ignored_names or len(self._ignored_names) < _FIELDS
        if known:
            self._ignored_names.add(field)
        self._ignored.labels(field[:64] if known else "other").inc()
        self.counts["ignored_fields"] += 1

    def times(self, engine_s: float, log_s: float, own_s: float) -> None:
        """Where the time of one request went."""
        self._engine.observe(engine_s)
        self._log.observe(log_s)
        self._own.observe(max(0.0, own_s))

    def engine(self, engine_id: str, state: str, states: Iterable[str], inflight: int, failures: int) -> None:
        """How it stands with an engine now."""
        for one in states:
            self._state.labels(engine_id, one).set(one == state)
        self._calls.labels(engine_id).set(inflight)
        self._behind.labels(engine_id).set(failures)

    def exposition(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.registry)
