"""How much KV a node has pulled, by its own metrics."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from pdserve.errors import ClusterError

_REPLY_S = 5.0


@dataclass(frozen=True)
class Pulls:
    """A node's complete pulls since it started."""

    num_pulls: int
    num_bytes: int
    seconds: float


async def fetch_pulls(metrics_address: str) -> Pulls:
    """Ask the node at `metrics_address`.

    Raises:
        ClusterError: it does not answer.
    """
    limit = aiohttp.ClientTimeout(total=_REPLY_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, raise_for_status=True) as session,
            session.get(f"http://{metrics_address}/metrics") as response,
        ):
            return parse_pulls(await response.text())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ClusterError(f"no metrics at {metrics_address}: {error}") from error


def parse_pulls(exposition: str) -> Pulls:
    """The pulls in a Prometheus text; 0 for what it does not say."""
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if not sample.labels
    }
    return Pulls(
        num_pulls=int(values.get("pdserve_pulls_total", 0)),
        num_bytes=int(values.get("pdserve_pulled_bytes_total", 0)),
        seconds=values.get("pdserve_pull_seconds_total", 0.0),
    )
