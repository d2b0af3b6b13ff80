"""HTTP requests to a coordinator: errors that say what is wrong, its key, and its streams."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, AsyncIterator
from typing import Literal

from pdserve.errors import ClusterError
from pdserve.settings.api_key import API_KEY_VARIABLE

END_MARK = b"[DONE]"  # the data of the last event of a stream
_DATA = b"data:"


async def request(
    method: Literal["GET", "POST"],
    url: str,
    path: str,
    *,
    timeout_s: float,
    headers: dict[str, str] | None = None,
    body: dict[str, object] | None = None,
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
            session.request(method, url.rstrip("/") + path, headers=headers, json=body) as response,
        ):
            return response.status, await response.read()
    except TimeoutError as error:
        raise ClusterError(f"no answer from {url} within {timeout_s:g} s") from error
    except aiohttp.ClientConnectorError as error:
        raise ClusterError(f"no coordinator at {url}: {error.strerror}") from error
    except (aiohttp.ClientError, ValueError) as error:
        raise ClusterError(f"no coordinator at {url}: {error}") from error


def key_headers() -> dict[str, str]:
    """HTTP headers with the API key from the environment; none if it is not set."""
    key = os.environ.get(API_KEY_VARIABLE, "")
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
