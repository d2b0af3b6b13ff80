"""Asks a coordinator for the status of its cluster."""

from __future__ import annotations

from pdserve.cluster.coordinator_http import Trust, request
from pdserve.errors import ClusterError, MalformedMessage
from pdserve.protocol.status import ClusterStatus, read_status

_REPLY_S = 5.0


async def fetch_status(
    url: str, timeout_s: float = _REPLY_S, *, trust: Trust = True
) -> ClusterStatus:
    """Ask the coordinator at `url`, such as "http://127.0.0.1:8000".

    Raises:
        ClusterError: no answer in time, or not a cluster's status.
    """
    code, content = await request("GET", url, "/status", timeout_s=timeout_s, trust=trust)
    if code != 200:
        raise ClusterError(f"{url}/status answers {code}, not 200")
    try:
        return read_status(content)
    except MalformedMessage as error:
        raise ClusterError(f"{url}/status is {error}") from error
