"""Reads a process's /metrics as numbers, and computes differences between two readings."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from pdserve.commands.cluster.coordinator_http import key_headers
from pdserve.shared.errors import ClusterError

REPLY_S = 5.0


@dataclass(frozen=True, slots=True)
class Samples:
    """One reading: samples without labels, and the buckets of histograms without labels."""

    values: dict[str, float]  # sample name |-> value
    buckets: dict[str, dict[float, float]]  # histogram |-> upper bound |-> cumulative count

    def __getitem__(self, name: str) -> float:
        return self.values[name]


@dataclass(frozen=True, slots=True)
class HistogramDelta:
    """The observations of a histogram between two readings."""

    count: float
    total: float
    buckets: list[tuple[float, float]]  # (upper bound, cumulative count), ascending

    @property
    def mean(self) -> float:
        """Mean of the observations; NaN if there are none."""
        return self.total / self.count if self.count else float("nan")

    def quantile(self, q: float) -> float:
        """Return a quantile, linear within its bucket, as Prometheus' histogram_quantile.

        NaN without observations.
        """
        if not self.count:
            return float("nan")
        rank, lower, below = q * self.count, 0.0, 0.0
        for upper, count in self.buckets:
            if count >= rank:
                inside = (rank - below) / (count - below) if count > below else 0.0
                return lower if upper == float("inf") else lower + inside * (upper - lower)
            lower, below = upper, count
        return lower


def between(before: Samples, after: Samples, name: str) -> HistogramDelta:
    """Return the observations of the histogram `name` between two readings."""
    earlier, later = before.buckets[name], after.buckets[name]
    return HistogramDelta(
        count=after[f"{name}_count"] - before[f"{name}_count"],
        total=after[f"{name}_sum"] - before[f"{name}_sum"],
        buckets=[(bound, later[bound] - earlier[bound]) for bound in sorted(later)],
    )


def parse(exposition: str) -> Samples:
    """Parse a Prometheus text."""
    values: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if not sample.labels:
                values[sample.name] = sample.value
            elif list(sample.labels) == ["le"]:
                name = sample.name.removesuffix("_bucket")
                buckets.setdefault(name, {})[float(sample.labels["le"])] = sample.value
    return Samples(values, buckets)


async def scrape(address: str) -> Samples:
    """GET /metrics of the process at `host:port`.

    Raises:
        ClusterError: the process does not answer.
    """
    limit = aiohttp.ClientTimeout(total=REPLY_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, raise_for_status=True) as session,
            session.get(f"http://{address}/metrics", headers=key_headers()) as response,
        ):
            return parse(await response.text())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ClusterError(f"no metrics at {address}: {error}") from error
