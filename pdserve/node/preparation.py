"""What requests wait for before the engine has them: their prefix and their grammar.

    submit ──► prefix beside grammar ──────────────────────► engine   a prompt to compute here
    recall ──► prefix ─────────────────────────────────────► engine   preempted; has room again
    take_in ──► prefix beside grammar, KV of a handoff ────► engine   computed on another node
    prefetch ──► prefix                                               to come; still runs elsewhere

What waits for nothing is submitted at once, and nobody waits for another request here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from pdserve.engine.engine import Engine
from pdserve.engine.request import Request
from pdserve.grammar import CompiledGrammar
from pdserve.node.prefixes.offers import Fetched, Prefix
from pdserve.protocol import PrefixSource
from pdserve.shared.errors import PdserveError

log = logging.getLogger(__name__)

T = TypeVar("T")
Sources: TypeAlias = Sequence[PrefixSource] | None  # None: nothing from beyond this host
FollowUp: TypeAlias = Callable[[Request, T | BaseException], None]  # the result, or the failure


class RequestTasks(Generic[T]):
    """The requests that wait, and their tasks. A request that is given up has no follow-up."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Task[T]] = {}  # request_id |-> its task
        self._requests: dict[asyncio.Task[T], Request] = {}  # with those that were given up

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def requests(self) -> list[Request]:
        """The requests that wait."""
        return [self._requests[task] for task in self._waiting.values()]

    def start(self, request: Request, work: Coroutine[Any, Any, T], follow_up: FollowUp[T]) -> None:
        """Begin `work` for a request, and call `follow_up` with its outcome when it is done."""
        task = asyncio.create_task(work)
        self._waiting[request.request_id] = task
        self._requests[task] = request
        task.add_done_callback(partial(self._ended, follow_up))

    def cancel(self, request_id: str) -> None:
        """Give up a request, even if its task has just ended. Unknown ids are ignored."""
        task = self._waiting.pop(request_id, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Give up all requests, and wait until every task has ended."""
        for request_id in list(self._waiting):
            self.cancel(request_id)
        await asyncio.gather(*self._requests, return_exceptions=True)

    def _ended(self, follow_up: FollowUp[T], task: asyncio.Task[T]) -> None:
        request = self._requests.pop(task)
        request_id = request.request_id
        if self._waiting.get(request_id) is task:  # the id may have come again
            del self._waiting[request_id]
            follow_up(request, _outcome_of(task))
        elif not task.cancelled():
            # This retrieves the exception: asyncio complains about those that nobody asks for.
            log.debug("%s was given up before its task ended: %r", request_id, task.exception())


def _outcome_of(task: asyncio.Task[T]) -> T | BaseException:
    if task.cancelled():  # not by `cancel`: then nobody would ask
        return PdserveError("what the request waited for was cancelled; send it again")
    return task.exception() or task.result()


class Fetcher(Protocol):
    """Fetches prefixes (`prefixes.fetch.PrefixFetcher`)."""

    def could_fetch(
        self, prefix: Prefix, sources: Sequence[PrefixSource], *, is_here: bool = False
    ) -> bool:
        """Whether anything could be fetched for this prefix; `is_here`: within this host."""
        ...

    async def fetch(
        self, prefix: Prefix, sources: Sequence[PrefixSource], *, is_here: bool = False
    ) -> Fetched:
        """Fetch as much of the prefix as is worth it. Raises nothing except when cancelled."""
        ...


class Compiler(Protocol):
    """Compiles grammars (`pdserve.engine.grammar.GrammarCompiler`)."""

    async def compiled(self, grammar: str, payer: str) -> CompiledGrammar | None:
        """Return a grammar compiled for one answer, in a turn of its payer's; None if it is empty.

        Raises GrammarFailed.
        """
        ...


class Preparation:
    """The way of all requests into a node's engine."""

    def __init__(self, fetcher: Fetcher, compiler: Compiler, engine: Engine) -> None:
        self.compiler = compiler
        self._fetcher = fetcher
        self._engine = engine
        self._prompts: RequestTasks[Fetched] = RequestTasks()
        self._handoffs: RequestTasks[None] = RequestTasks()
        self._prefetches: RequestTasks[Fetched] = RequestTasks()

    def __len__(self) -> int:
        """Requests that are to be submitted, preempted ones included."""
        return len(self._prompts)

    @property
    def prompts(self) -> list[Request]:
        """Requests whose prompt is to be computed here."""
        return [request for request in self._prompts.requests if not request.output_token_ids]

    # ---- ways in -------------------------------------------------------------------------------

    def submit(self, request: Request, sources: Sequence[PrefixSource]) -> None:
        """Submit a request, now or when it is prepared; it fails if its grammar does."""
        prefix = Prefix.reusable(request, self._engine.pool.block_size)
        if self._waits(request, prefix, sources):
            self._prompts.start(request, self._prepare(request, prefix, sources), self._prepared)
        else:
            self._engine.submit(request)

    def recall(self, request: Request) -> None:
        """Fetch the KV of a preempted request, and submit it again (`StepObserver.recall`)."""
        prefix = Prefix.reusable(request, self._engine.pool.block_size)
        fetching = self._prepare(request, prefix, request.prefix_sources)
        self._prompts.start(request, fetching, self._recalled)

    def take_in(
        self, request: Request, work: Coroutine[Any, Any, None], follow_up: FollowUp[None]
    ) -> None:
        """Begin `work`, which brings a request's KV and has the engine adopt it."""
        self._handoffs.start(request, work, follow_up)

    def prefetch(
        self, request: Request, sources: Sequence[PrefixSource], follow_up: FollowUp[Fetched]
    ) -> None:
        """Fetch the KV of a request that may come later; it stays in the prefix cache till then."""
        prefix = Prefix.reusable(request, self._engine.pool.block_size)
        self._prefetches.start(request, self._fetch(request, prefix, sources), follow_up)

    @asynccontextmanager
    async def beside(
        self, request: Request, prefix: Prefix
    ) -> AsyncIterator[asyncio.Task[Fetched] | None]:
        """Prepare a request, from this host alone, while the context does something else.

        Enters with the task, which raises GrammarFailed and does not outlive the context; with None
        if there is nothing to wait for.
        """
        if not self._waits(request, prefix, None):
            yield None
            return
        preparing = asyncio.create_task(self._prepare(request, prefix, None))
        try:
            yield preparing
        finally:
            await _end(preparing)

    # ---- the end -------------------------------------------------------------------------------

    def cancel(self, request_id: str) -> None:
        """Give a request up, here and in the engine. Unknown ids are ignored.

        Its blocks are free once the running step has ended.
        """
        self._prompts.cancel(request_id)
        self._handoffs.cancel(request_id)
        self._prefetches.cancel(request_id)
        self._engine.cancel(request_id)

    async def close(self) -> None:
        """Give up what waits here, and wait until it has ended."""
        await self._prompts.close()
        await self._handoffs.close()
        await self._prefetches.close()

    # ---- parts ---------------------------------------------------------------------------------

    def _waits(self, request: Request, prefix: Prefix, sources: Sources) -> bool:
        if _lacks_grammar(request):
            return True
        return self._fetcher.could_fetch(prefix, sources or (), is_here=sources is None)

    async def _prepare(self, request: Request, prefix: Prefix, sources: Sources) -> Fetched:
        """Fetch the prefix, and compile the grammar meanwhile. Raises GrammarFailed."""
        if not _lacks_grammar(request):
            return await self._fetch(request, prefix, sources)
        fetching = asyncio.create_task(self._fetch(request, prefix, sources))
        try:
            payer = request.targets.payer
            grammar = await self.compiler.compiled(request.sampling.grammar, payer)
            for answer in request.answers:  # only token 1 of siblings is sampled here
                answer.grammar = grammar
            return await fetching
        finally:
            await _end(fetching)

    async def _fetch(self, request: Request, prefix: Prefix, sources: Sources) -> Fetched:
        try:
            return await self._fetcher.fetch(prefix, sources or (), is_here=sources is None)
        except Exception:  # the prompt is computed instead
            log.exception("fetching a prefix for %s failed", request.request_id)
            return Fetched()

    def _prepared(self, request: Request, outcome: Fetched | BaseException) -> None:
        if not isinstance(outcome, BaseException):
            self._engine.submit(request)
            return
        if not isinstance(outcome, PdserveError):
            log.error("preparing %s failed", request.request_id, exc_info=outcome)
            outcome = PdserveError(f"its grammar failed: {type(outcome).__name__}: {outcome}")
        self._engine.fail(request, outcome)

    def _recalled(self, request: Request, outcome: Fetched | BaseException) -> None:
        if isinstance(outcome, Fetched):
            statistics = self._engine.queues.preemptions.statistics
            statistics.swapped_tokens += outcome.from_tier
            statistics.pulled_tokens += outcome.from_nodes
        self._prepared(request, outcome)


def _lacks_grammar(request: Request) -> bool:
    """Whether its grammar is to be compiled; a preempted request has it already."""
    return bool(request.sampling.grammar) and request.grammar is None


async def _end(task: asyncio.Task[Fetched]) -> None:
    """Cancel a task if it is not over, and wait for its end; its outcome is not needed any more."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
