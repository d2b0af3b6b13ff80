"""Compiles grammars in threads of their own, so that no step and no light grammar waits for one.

Grammars come from clients. Coordinators have checked that they can be compiled in bounded time, but
other work on this machine may make it long. Heavy grammars wait for each other; each payer gets its
turns, however many answers a call of another one has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from pdserve.grammar import CompiledGrammar, DeepThreads, Vocabulary, compile_grammar, is_light
from pdserve.shared.errors import GrammarFailed, TokenizerError
from pdserve.shared.turns import Turns

COMPILE_S = 10.0  # limit for one grammar, once it is its turn
_NAME = "grammar-compiler"


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
        self._turns = {kind: Turns() for kind in (True, False)}
        self._threads = {kind: DeepThreads(1, _NAME) for kind in (True, False)}

    def load(self) -> None:
        """Load the vocabulary in advance, in any thread.

        If that fails, nothing is raised here; only requests that have a grammar will fail.
        """
        with suppress(TokenizerError):
            self._vocabulary = self._load_vocabulary()

    async def compiled(self, grammar: str, payer: str = "") -> CompiledGrammar | None:
        """Return a grammar compiled for one answer, in a turn of its payer's; None if it is empty.

        The wait for its turn ends with the request: whoever ends that cancels this.

        Raises:
            GrammarFailed: it is invalid, exceeds a limit, or was not compiled in time.
        """
        if not grammar:
            return None
        kind = is_light(grammar)
        async with self._turns[kind].of(payer):
            # The thread may still be at one that was cancelled: the limit bounds both together.
            future = self._threads[kind].submit(lambda: self._compile_here(grammar))
            try:
                async with asyncio.timeout(self._compile_s):
                    return await asyncio.wrap_future(future)
            except TimeoutError:
                self._threads[kind].retire()  # its thread ends by itself, when it is done
                self._threads[kind] = DeepThreads(1, _NAME)
                raise GrammarFailed(
                    f"the grammar was not compiled within {self._compile_s:g} s: make it smaller, "
                    "or try again when there is less load"
                ) from None

    def _compile_here(self, grammar: str) -> CompiledGrammar:
        """Compile in the calling thread. Raises GrammarFailed."""
        try:
            vocabulary = self._vocabulary or self._load_vocabulary()
        except TokenizerError as error:
            raise GrammarFailed(error.message) from error
        self._vocabulary = vocabulary
        return self._compile_one(vocabulary, grammar)
