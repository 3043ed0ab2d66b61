"""Numbers of a process without HTTP of its own as Prometheus text at http://127.0.0.1:<port>/metrics; nothing at all with port 0.

The numbers are read when somebody asks, from what the process keeps anyway: nothing is counted twice, and nothing costs when
nobody looks. Loopback only: who wants them elsewhere puts something in front.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import structlog
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from schemas.errors import ConfigError
from schemas.metric_names import ArchiveMetric, MetricName, StreamMetric

log = structlog.get_logger()
_HOST = "127.0.0.1"
_TOTAL = "_total"
_MOST_PORTS = 64


class Number(NamedTuple):
    """One sample."""

    name: StreamMetric | MetricName | ArchiveMetric
    value: float
    labels: Mapping[str, str] = {}


Read = Callable[[], Iterable[Number]]


class _Numbers(Collector):
    def __init__(self, read: Read) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for number in self._read():
            name, labels = number.name.replace("/", "_"), dict(number.labels)
            family = families.get(name)
            if family is None:
                make = CounterMetricFamily if name.endswith(_TOTAL) else GaugeMetricFamily
                family = families[name] = make(name, number.name, labels=list(labels))
            family.add_metric(list(labels.values()), number.value)  # type: ignore[attr-defined]
        yield from families.values()


def serve_metrics(port: int, read: Read, *, or_next: bool = False) -> int:
    """Serve in a daemon thread; the port, 0 if it is off. `or_next`: the next free one, for several processes of a kind.

    ConfigError: the port is taken.
    """
    if not port:
        return 0
    registry = CollectorRegistry()
    registry.register(_Numbers(read))
    for candidate in range(port, port + (_MOST_PORTS if or_next else 1)):
        try:
            start_http_server(candidate, _HOST, registry)
        except OSError:
            continue
        log.info("metrics", port=candidate)
        return candidate
    raise ConfigError(f"port {port} for metrics is taken", port=port)
