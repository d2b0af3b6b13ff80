"""Prometheus collectors that prometheus-client lacks: read at the scrape, or cheap per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pdserve._native import Histogram


class ReadCounter(Collector):
    """A counter whose value is read at each scrape: prometheus-client's cannot be set."""

    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._name = name
        self._text = text
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily]:
        """As Collector.collect."""
        yield CounterMetricFamily(self._name, self._text, value=self._read())


class QuickHistogram(Collector):
    """A histogram without labels, at a tenth of the cost of prometheus-client's.

    It has no lock: only one thread may observe.
    """

    def __init__(self, name: str, text: str, buckets: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._bounds = (*buckets, float("inf"))
        self.counts = Histogram(buckets)

    def observe(self, value: float) -> None:
        """Add one observation."""
        self.counts.observe(value)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """As Collector.collect."""
        bounds = map(floatToGoString, self._bounds)
        buckets = list(zip(bounds, accumulate(self.counts.counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets, self.counts.sum)


class _ReadEach(Collector):
    """A metric per label value that exists at the moment of the scrape.

    prometheus-client's metrics keep every label value that they have ever seen.
    """

    family: type[GaugeMetricFamily | CounterMetricFamily]

    def __init__(
        self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]
    ) -> None:
        self._name = name
        self._text = text
        self._label = label
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """As Collector.collect."""
        family = self.family(self._name, self._text, labels=[self._label])
        for value, level in self._read().items():
            family.add_metric([value], level)
        yield family


class ReadGauges(_ReadEach):
    """Gauges."""

    family = GaugeMetricFamily


class ReadCounters(_ReadEach):
    """Counters that are kept elsewhere."""

    family = CounterMetricFamily
