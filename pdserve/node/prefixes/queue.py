"""Submits requests to the engine: at once, or after their prefix has been fetched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from pdserve.engine.request import Request
from pdserve.node.prefixes.fetch import Fetched, PrefixFetcher
from pdserve.node.prefixes.parts import Prefix
from pdserve.node.request_tasks import RequestTasks
from pdserve.protocol import PrefixSource

log = logging.getLogger(__name__)


class PrefixQueue(RequestTasks[Fetched]):
    """Requests whose prefix is being fetched."""

    def __init__(
        self, fetcher: PrefixFetcher, block_size: int, submit: Callable[[Request], None]
    ) -> None:
        super().__init__()
        self.fetcher = fetcher
        self._block_size = block_size
        self._submit = submit

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
        self.start(request, self.fetcher.fetch(prefix, sources), partial(self._fetched, fetched))
        return True

    def _fetched(
        self,
        fetched: Callable[[Fetched], None],
        request: Request,
        outcome: Fetched | BaseException,
    ) -> None:
        if isinstance(outcome, BaseException):
            log.error("fetching a prefix for %s failed", request.request_id, exc_info=outcome)
        else:
            fetched(outcome)
        self._submit(request)


def _ignore(_: Fetched) -> None:
    """The fetcher counts it in its own statistics."""
