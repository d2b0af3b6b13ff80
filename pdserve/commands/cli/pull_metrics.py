"""How much KV a node has pulled, according to its metrics."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.commands.cluster.scrape import Samples, scrape


@dataclass(frozen=True)
class PullMetrics:
    """The complete pulls of a node since its start."""

    num_pulls: int
    num_bytes: int
    seconds: float


async def fetch_pulls(metrics_address: str) -> PullMetrics:
    """Read the metrics of the node at `metrics_address`.

    Raises:
        ClusterError: it does not answer.
    """
    return pulls_in(await scrape(metrics_address))


def pulls_in(samples: Samples) -> PullMetrics:
    """The pulls in a node's metrics; 0 for missing samples."""
    values = samples.values
    return PullMetrics(
        num_pulls=int(values.get("pdserve_pulls_total", 0)),
        num_bytes=int(values.get("pdserve_pulled_bytes_total", 0)),
        seconds=values.get("pdserve_pull_seconds_total", 0.0),
    )
