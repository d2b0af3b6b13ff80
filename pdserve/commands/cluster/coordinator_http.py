"""HTTP requests to a coordinator: errors that say what is wrong, its key, and its streams."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterable, AsyncIterator
from pathlib import Path
from typing import Literal, TypeAlias

from pdserve.settings.access import API_KEY_VARIABLE
from pdserve.shared.errors import ClusterError, ConfigError

END_MARK = b"[DONE]"  # the data of the last event of a stream
_DATA = b"data:"

Trust: TypeAlias = ssl.SSLContext | bool  # whom to take for the server; True: as this machine does


async def request(
    method: Literal["GET", "POST"],
    url: str,
    path: str,
    *,
    timeout_s: float,
    headers: dict[str, str] | None = None,
    body: dict[str, object] | None = None,
    trust: Trust = True,
) -> tuple[int, bytes]:
    """Send a request to the coordinator at `url`, such as "http://127.0.0.1:8000".

    Returns (status, content).

    Raises:
        ClusterError: no answer in time, or no connection.
    """
    import aiohttp  # slow to import; a supervisor should start its children first

    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.request(
                method, url.rstrip("/") + path, headers=headers, json=body, ssl=trust
            ) as response,
        ):
            return response.status, await response.read()
    except TimeoutError as error:
        raise ClusterError(f"no answer from {url} within {timeout_s:g} s") from error
    except (aiohttp.ClientError, ValueError) as error:
        raise not_reached(url, error) from error


def not_reached(url: str, error: Exception) -> ClusterError:
    """Return what to say where a call of a coordinator failed."""
    import aiohttp

    if isinstance(error, aiohttp.ClientSSLError):
        if "WRONG_VERSION_NUMBER" in str(error):  # an answer in clear text
            return ClusterError(f"no HTTPS at {url}: write http:// if it has no certificate")
        return ClusterError(
            f"no coordinator to be trusted at {url}: {error} (--ca or SSL_CERT_FILE names the file "
            "with the certificate of its CA)"
        )
    why = error.strerror if isinstance(error, aiohttp.ClientConnectorError) else str(error)
    return ClusterError(f"no coordinator at {url}: {why or type(error).__name__}")


def trust_in(ca: Path | None) -> Trust:
    """Trust the servers whose certificates the CAs in a file have signed; by default, as usual.

    Raises:
        ConfigError: the file cannot be used.
    """
    if ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"--ca {ca} has no certificate of a CA: {error}") from error


def key_headers(key: str | None = None) -> dict[str, str]:
    """HTTP headers with a key, by default that from the environment; none without one."""
    key = os.environ.get(API_KEY_VARIABLE, "") if key is None else key
    return {"Authorization": f"Bearer {key}"} if key else {}


async def events_in(pieces: AsyncIterable[bytes]) -> AsyncIterator[list[bytes]]:
    """Yield the data of the server-sent events of a stream, as they are completed by each piece.

    For streams in the style of OpenAI, whose events are one line of data each; comments and names
    of events are left out.
    """
    partial = b""
    async for piece in pieces:
        *lines, partial = (partial + piece).split(b"\n")
        yield [line.removeprefix(_DATA).strip() for line in lines if line.startswith(_DATA)]
