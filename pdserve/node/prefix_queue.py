"""Submits requests to the engine: at once, or after their prefix has been fetched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from pdserve.engine.request import Request
from pdserve.node.prefix_fetch import Fetched, PrefixFetcher
from pdserve.node.prefix_parts import Prefix
from pdserve.protocol import PrefixSource

log = logging.getLogger(__name__)


class PrefixQueue:
    """Requests whose prefix is being fetched."""

    def __init__(
        self, fetcher: PrefixFetcher, block_size: int, submit: Callable[[Request], None]
    ) -> None:
        self.fetcher = fetcher
        self._block_size = block_size
        self._submit = submit
        self._tasks: dict[str, asyncio.Task[Fetched]] = {}  # by request id

    def __len__(self) -> int:
        return len(self._tasks)

    def submit(self, request: Request, sources: Sequence[PrefixSource]) -> None:
        """Submit the request, now or after fetching its prefix."""
        if not self._fetch(request, sources, _ignore):
            self._submit(request)

    def recall(self, request: Request, fetched: Callable[[Fetched], None]) -> bool:
        """Fetch the KV of a preempted request and submit it again; False if there is none to fetch.

        Args:
            request: no longer in the engine's queues.
            fetched: called with the result, just before the request is submitted.
        """
        return self._fetch(request, request.prefix_sources, fetched)

    def cancel(self, request_id: str) -> None:
        """Stop fetching for a request, which is then not submitted. Unknown ids are ignored."""
        task = self._tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Cancel all fetches, and wait until they have ended."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _fetch(
        self,
        request: Request,
        sources: Sequence[PrefixSource],
        fetched: Callable[[Fetched], None],
    ) -> bool:
        """Start a fetch, if anything could be fetched; whether it was started."""
        request.extend_hashes(request.num_tokens, self._block_size)
        num_reusable = request.num_reusable_tokens // self._block_size
        prefix = Prefix(
            request.token_slice(0, request.num_tokens),
            request.cache_salt,
            request.block_hashes[:num_reusable],
        )
        if not self.fetcher.could_fetch(prefix, sources):
            return False
        task = asyncio.create_task(self.fetcher.fetch(prefix, sources))
        self._tasks[request.request_id] = task
        task.add_done_callback(partial(self._fetched, request, fetched))
        return True

    def _fetched(
        self,
        request: Request,
        fetched: Callable[[Fetched], None],
        task: asyncio.Task[Fetched],
    ) -> None:
        if self._tasks.get(request.request_id) is not task:
            return  # cancelled, perhaps just before its end
        del self._tasks[request.request_id]
        if task.cancelled():
            return  # by `close`
        error = task.exception()
        if error is not None:
            log.error("fetching a prefix for %s failed", request.request_id, exc_info=error)
        else:
            fetched(task.result())
        self._submit(request)


def _ignore(_: Fetched) -> None:
    """The fetcher counts it in its own statistics."""
