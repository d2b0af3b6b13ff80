"""Load for a cluster: streamed completions of token prompts, as a client would send them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp

from pdserve.shared.errors import ClusterError

PLAIN_IDS: Final = range(20, 220)  # ordinary tokens in any vocabulary

_TAIL_BYTES: Final = 4096  # of a stream's end, which contains any error


def completion_body(model: str, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """Return a request for exactly `num_tokens` tokens, streamed."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }


def sharing(salt: str) -> dict[str, Any]:
    """Return the field of a request that shares its prefix only with those of the same salt."""
    return {"cache_salt": salt}


class Client:
    """Sends requests to one coordinator, any number concurrently."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = url
        self._model = model

    async def stream(self, prompt: Sequence[int], num_tokens: int) -> None:
        """Send one request, and read until its last token.

        Only the end is parsed: a client that reads line by line uses more CPU than what it
        measures.

        Raises:
            ClusterError: the request was refused, or its stream broke.
        """
        body = completion_body(self._model, prompt, num_tokens)
        tail = b""
        try:
            async with self._session.post(
                f"{self._url}/v1/completions", json=body, raise_for_status=True
            ) as response:
                async for piece in response.content.iter_any():
                    tail = tail[-_TAIL_BYTES:] + piece
        except aiohttp.ClientError as error:
            raise ClusterError(f"a stream broke: {error}") from error
        *_, last = tail.strip().splitlines() or [b""]
        if last != b"data: [DONE]":  # an error in mid-stream is its last event
            raise ClusterError(f"a stream broke: {last.decode(errors='replace')}")


@asynccontextmanager
async def group_within(seconds: float, late: str) -> AsyncIterator[asyncio.TaskGroup]:
    """A group of tasks that have so many seconds, with what is done beside them.

    Raises:
        ClusterError: says `late` if they were not done by then, else what the first one raised.
    """
    failure: ClusterError | None = None
    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
            yield tasks
    except* TimeoutError:
        failure = ClusterError(late)
    except* ClusterError as errors:
        failure = ClusterError(str(errors.exceptions[0]))
    if failure is not None:
        raise failure


@asynccontextmanager
async def open_client(url: str, model: str) -> AsyncIterator[Client]:
    """Yield a client for `model` of the cluster at `url`."""
    async with open_session() as session:
        yield Client(session, url, model)


def open_session(
    headers: Mapping[str, str] | None = None, *, keeps_connections: bool = True
) -> aiohttp.ClientSession:
    """Open a session without limits on connections and total time; callers set deadlines."""
    return aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0, force_close=not keeps_connections),
        timeout=aiohttp.ClientTimeout(total=None),
    )
