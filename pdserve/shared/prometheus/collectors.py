"""Prometheus collectors that prometheus-client lacks: read at the scrape, or cheap to count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Generic, TypeVar

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


C = TypeVar("C")


class _Labelled(Collector, Generic[C]):
    """What is counted for each combination of label values, at a tenth of prometheus-client's cost.

    It has no lock: only one thread may count.
    """

    def __init__(
        self, name: str, text: str, labels: tuple[str, ...], make: Callable[[], C]
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._make = make
        self._children: dict[tuple[object, ...], C] = {}

    def labels(self, *values: object, **named: object) -> C:
        """Return what is counted with these label values, in order or by name."""
        if named:
            values = tuple([named[name] for name in self._labels])
        child = self._children.get(values)
        if child is None:
            assert len(values) == len(self._labels), f"{self._name} has labels {self._labels}"
            child = self._children[values] = self._make()
        return child

    def _each(self) -> Iterator[tuple[list[str], C]]:
        for values, child in list(self._children.items()):
            yield [str(value) for value in values], child


class Count:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Count more."""
        self.value += amount


class QuickCounter(_Labelled[Count]):
    """A counter."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...] = ()) -> None:
        super().__init__(name, text, labels, Count)
        if not labels:
            self.inc = self.labels().inc

    def collect(self) -> Iterator[CounterMetricFamily]:
        """As Collector.collect."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self._each():
            family.add_metric(values, count.value)
        yield family


class QuickHistograms(_Labelled[Histogram]):
    """Histograms."""

    def __init__(
        self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...]
    ) -> None:
        super().__init__(name, text, labels, lambda: Histogram(buckets))
        self._buckets = buckets

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """As Collector.collect."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, histogram in self._each():
            family.add_metric(values, _buckets(self._buckets, histogram), histogram.sum)
        yield family


class QuickHistogram(Collector):
    """A histogram without labels; only one thread may observe."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._buckets = buckets
        self.counts = Histogram(buckets)
        self.observe = self.counts.observe  # a call less

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """As Collector.collect."""
        buckets = _buckets(self._buckets, self.counts)
        yield HistogramMetricFamily(self._name, self._text, buckets, self.counts.sum)


def _buckets(bounds: Iterable[float], histogram: Histogram) -> list[tuple[str, float]]:
    names = map(floatToGoString, (*bounds, float("inf")))
    return list(zip(names, accumulate(histogram.counts), strict=True))


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
