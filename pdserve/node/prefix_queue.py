"""Requests on their way into the engine: at once, or after their prefix has been fetched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from pdserve.engine.engine import Engine, StepReport
from pdserve.engine.request import Request
from pdserve.node.cost import Costs
from pdserve.node.gauges import watch_prefix_fetches
from pdserve.node.headroom import Headroom, num_spoken_for
from pdserve.node.prefix_fetch import PrefixFetcher
from pdserve.node.prefix_parts import FetchParts, Prefix
from pdserve.node.roles import NodeParts
from pdserve.node.session_client import Sessions
from pdserve.protocol import PrefixSource

log = logging.getLogger(__name__)


def make_prefix_queue(parts: NodeParts, engine: Engine, sessions: Sessions) -> PrefixQueue:
    """For a role's engine."""
    config = parts.config
    fetcher = PrefixFetcher(
        FetchParts(
            pool=parts.pool,
            identity=parts.identity,
            puller=parts.puller,
            sessions=sessions,
            tier=parts.tier,
            costs=Costs(config.engine.token_budget),
            clock=parts.clock,
            headroom=Headroom(parts.pool, partial(num_spoken_for, engine.queues)),
        ),
        config.prefix.prefix_pull if config.engine.prefix_cache else "never",
        config.timeouts.prefix_s,
    )
    watch_prefix_fetches(parts.metrics, fetcher.statistics)
    return PrefixQueue(fetcher, parts.pool.block_size, engine.submit)


class PrefixQueue:
    """Requests whose prefix is being fetched."""

    def __init__(
        self, fetcher: PrefixFetcher, block_size: int, submit: Callable[[Request], None]
    ) -> None:
        self.fetcher = fetcher
        self._block_size = block_size
        self._submit = submit
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by request id

    def __len__(self) -> int:
        return len(self._tasks)

    def submit(self, request: Request, sources: Sequence[PrefixSource]) -> None:
        """Submit the request, now or when what can be fetched for it is there."""
        request.extend_hashes(request.num_tokens, self._block_size)
        num_reusable = (request.num_tokens - 1) // self._block_size  # one token is always computed
        prefix = Prefix(
            request.prompt_token_ids, request.cache_salt, request.block_hashes[:num_reusable]
        )
        if not self.fetcher.could_fetch(prefix, sources):
            self._submit(request)
            return
        task = asyncio.create_task(self.fetcher.fetch(prefix, sources))
        self._tasks[request.request_id] = task
        task.add_done_callback(partial(self._fetched, request))

    def cancel(self, request_id: str) -> None:
        """Stop fetching for a request, which then is not submitted; it need not be known."""
        task = self._tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    def observe_step(self, report: StepReport) -> None:
        """Learn from a step that computed prompts what computing costs."""
        if any(row.num_tokens > 1 for row in report.rows):
            num_tokens = sum(row.num_tokens for row in report.rows)
            self.fetcher.costs.observe_step(num_tokens, report.model_s)

    async def close(self) -> None:
        """Cancel them all; nothing of theirs is left running or held."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _fetched(self, request: Request, task: asyncio.Task[None]) -> None:
        if self._tasks.get(request.request_id) is not task:
            return  # cancelled, perhaps when it was as good as over
        del self._tasks[request.request_id]
        if task.cancelled():
            return  # by `close`
        error = task.exception()
        if error is not None:
            log.error("fetching a prefix for %s failed", request.request_id, exc_info=error)
        self._submit(request)
