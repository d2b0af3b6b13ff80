"""Submits requests to the engine: at once, or after their grammar has been compiled."""

from __future__ import annotations

import logging

from pdserve.engine.engine import Engine
from pdserve.engine.grammar import GrammarCompiler
from pdserve.engine.request import Request
from pdserve.errors import PdserveError
from pdserve.node.request_tasks import RequestTasks

log = logging.getLogger(__name__)


class GrammarQueue(RequestTasks[None]):
    """Requests whose grammar is being compiled; others do not wait for them."""

    def __init__(self, compiler: GrammarCompiler, engine: Engine) -> None:
        super().__init__()
        self.compiler = compiler
        self._engine = engine

    def submit(self, request: Request) -> None:
        """Submit the request, now or when its grammar is compiled; it fails if that fails."""
        if request.sampling.grammar and request.grammar is None:
            self.start(request, self._compile(request), self._compiled)
        else:
            self._engine.submit(request)

    async def _compile(self, request: Request) -> None:
        grammar = await self.compiler.compiled(request.sampling.grammar)
        for answer in request.answers:  # only token 1 of siblings is sampled here
            answer.grammar = grammar

    def _compiled(self, request: Request, error: BaseException | None) -> None:
        if error is None:
            self._engine.submit(request)
            return
        if not isinstance(error, PdserveError):
            log.error("compiling the grammar of %s failed", request.request_id, exc_info=error)
            error = PdserveError(f"its grammar failed: {type(error).__name__}: {error}")
        self._engine.fail(request, error)
