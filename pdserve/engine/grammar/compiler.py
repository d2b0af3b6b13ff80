"""Compiles grammars in threads of their own, so that no step and no other request waits for one.

Grammars come from clients. Coordinators have checked that they can be compiled in bounded time, but
other work on this machine may make it long.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from pdserve.errors import GrammarFailed, TokenizerError
from pdserve.grammar import CompiledGrammar, DeepThreads, Vocabulary, compile_grammar, is_light

COMPILE_S = 10.0  # limit for one grammar, with the time it waits for others
_NAME = "grammar-compiler"
_MAX_KEPT = 64  # grammars; most requests of an application have the same one


class GrammarCompiler:
    """The grammars of one model's requests. Used on one event loop, except for `load`."""

    def __init__(
        self,
        load_vocabulary: Callable[[], Vocabulary],
        compile_s: float = COMPILE_S,
        compile_one: Callable[[Vocabulary, str], CompiledGrammar] = compile_grammar,
    ) -> None:
        """
        Args:
            load_vocabulary: slow; called by `load`, or with the first grammar.
            compile_s: time limit for one grammar, in seconds.
            compile_one: slow; called in a thread.
        """
        self._load_vocabulary = load_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._compile_s = compile_s
        self._compile_one = compile_one
        # By `is_light`: one thread for light grammars, and one for others, which thus never delay
        # light ones.
        self._turns = {kind: asyncio.Lock() for kind in (True, False)}
        self._threads = {kind: DeepThreads(1, _NAME) for kind in (True, False)}
        self._kept: OrderedDict[str, asyncio.Task[CompiledGrammar]] = OrderedDict()

    def load(self) -> None:
        """Load the vocabulary in advance, in any thread.

        If that fails, nothing is raised here; only requests that have a grammar will fail.
        """
        with suppress(TokenizerError):
            self._vocabulary = self._load_vocabulary()

    async def compiled(self, grammar: str) -> CompiledGrammar | None:
        """Return the grammar compiled, at once if it was before; None if it is empty.

        Raises:
            GrammarFailed: it is invalid, exceeds a limit, or was not compiled in time.
        """
        if not grammar:
            return None
        task = self._kept.get(grammar)
        if task is None:
            task = self._kept[grammar] = asyncio.create_task(self._compile(grammar))
            task.add_done_callback(lambda task: self._forget_failed(grammar, task))
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        return await asyncio.shield(task)  # others may wait for the same one

    async def close(self) -> None:
        """Give up the grammars that are being compiled."""
        tasks = list(self._kept.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget_failed(self, grammar: str, task: asyncio.Task[CompiledGrammar]) -> None:
        if (task.cancelled() or task.exception()) and self._kept.get(grammar) is task:
            del self._kept[grammar]

    async def _compile(self, grammar: str) -> CompiledGrammar:
        kind = is_light(grammar)
        try:
            async with asyncio.timeout(self._compile_s), self._turns[kind]:
                future = self._threads[kind].submit(lambda: self._compile_here(grammar))
                try:
                    return await asyncio.wrap_future(future)
                finally:
                    if not future.done():  # the thread ends by itself, when it is done
                        self._threads[kind].retire()
                        self._threads[kind] = DeepThreads(1, _NAME)
        except TimeoutError:
            raise GrammarFailed(
                f"the grammar was not compiled within {self._compile_s:g} s: make it smaller, or "
                "try again when there is less load"
            ) from None

    def _compile_here(self, grammar: str) -> CompiledGrammar:
        """Compile in the calling thread. Raises GrammarFailed."""
        try:
            vocabulary = self._vocabulary or self._load_vocabulary()
        except TokenizerError as error:
            raise GrammarFailed(error.message) from error
        self._vocabulary = vocabulary
        return self._compile_one(vocabulary, grammar)
