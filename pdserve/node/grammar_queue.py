"""Submits requests to the engine: at once, or after their grammar has been compiled."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from pdserve.engine.engine import Engine
from pdserve.engine.grammar import GrammarCompiler
from pdserve.engine.request import Request
from pdserve.errors import PdserveError

log = logging.getLogger(__name__)


class GrammarQueue:
    """Requests whose grammar is being compiled; others do not wait for them."""

    def __init__(self, compiler: GrammarCompiler, engine: Engine) -> None:
        self.compiler = compiler
        self._engine = engine
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by request id

    def __len__(self) -> int:
        return len(self._tasks)

    def submit(self, request: Request) -> None:
        """Submit the request, now or when its grammar is compiled; it fails if that fails."""
        if not request.sampling.grammar or request.grammar is not None:
            self._engine.submit(request)
            return
        task = asyncio.create_task(self._compile(request))
        self._tasks[request.request_id] = task
        task.add_done_callback(partial(self._compiled, request))

    def cancel(self, request_id: str) -> None:
        """Give up a request, which is then not submitted. Unknown ids are ignored."""
        task = self._tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Give up all requests."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _compile(self, request: Request) -> None:
        for answer in request.answers:
            answer.grammar = await self.compiler.compiled(request.sampling.grammar)

    def _compiled(self, request: Request, task: asyncio.Task[None]) -> None:
        if self._tasks.get(request.request_id) is not task:
            return  # cancelled, perhaps just before its end
        del self._tasks[request.request_id]
        if task.cancelled():
            return  # by `close`
        error = task.exception()
        if error is None:
            self._engine.submit(request)
            return
        if not isinstance(error, PdserveError):
            log.error("compiling the grammar of %s failed", request.request_id, exc_info=error)
            error = PdserveError(f"its grammar failed: {type(error).__name__}: {error}")
        self._engine.fail(request, error)
