"""The certificate that a coordinator shows to its clients: whoever connects can see its end."""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import urlsplit

from pdserve.commands.cluster.coordinator_http import Trust
from pdserve.shared.errors import ClusterError

_REPLY_S = 5.0


async def https_end(url: str, trust: Trust = True) -> float | None:
    """When the certificate at an https:// URL ends, in seconds since 1970; None: it is http://.

    Raises:
        ClusterError: nobody answers, or the certificate is not to be trusted, as when it has ended.
    """
    parts = urlsplit(url)
    if parts.scheme != "https":
        return None
    trusted = trust if isinstance(trust, ssl.SSLContext) else ssl.create_default_context()
    try:
        async with asyncio.timeout(_REPLY_S):
            _, writer = await asyncio.open_connection(
                parts.hostname, parts.port or 443, ssl=trusted
            )
    except (OSError, TimeoutError) as error:
        raise ClusterError(f"no certificate from {url}: {error}") from error
    shown = writer.get_extra_info("peercert")
    writer.transport.abort()
    return float(ssl.cert_time_to_seconds(shown["notAfter"]))
