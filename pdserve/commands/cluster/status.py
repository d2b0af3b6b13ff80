"""Asks a coordinator for the status of its cluster."""

from __future__ import annotations

from pdserve.commands.cluster.coordinator_http import Trust, key_headers, request
from pdserve.protocol.status import ClusterStatus, read_status
from pdserve.settings.access import API_KEY_VARIABLE
from pdserve.shared.errors import ClusterError, MalformedMessage

_REPLY_S = 5.0


async def fetch_status(
    url: str, timeout_s: float = _REPLY_S, *, trust: Trust = True, key: str | None = None
) -> ClusterStatus:
    """Ask the coordinator at `url`, such as "http://127.0.0.1:8000".

    `key`: shown to it; by default that from the environment.

    Raises:
        ClusterError: no answer in time, or not a cluster's status.
    """
    code, content = await request(
        "GET", url, "/status", timeout_s=timeout_s, headers=key_headers(key), trust=trust
    )
    if code == 401:
        raise ClusterError(
            f"{url}/status is for who has an API key or the token of access.metrics_token_file: "
            f"set {API_KEY_VARIABLE} to one that this coordinator knows"
        )
    if code != 200:
        raise ClusterError(f"{url}/status answers {code}, not 200")
    try:
        return read_status(content)
    except MalformedMessage as error:
        raise ClusterError(f"{url}/status is {error}") from error
