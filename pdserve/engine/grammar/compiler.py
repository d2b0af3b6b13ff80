"""Compiles grammars in threads of their own, so that no step and no light grammar waits for one.

Grammars come from clients. Coordinators have checked that they can be compiled in bounded time, but
other work on this machine may make it long. Heavy grammars wait for each other; each payer gets its
turns, however many answers a call of another one has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdserve.grammar import CompiledGrammar, DeepThreads, Vocabulary, compile_grammar, is_light
from pdserve.shared.errors import GrammarFailed, TokenizerError
from pdserve.shared.fair_share import Turns

COMPILE_S = 10.0  # limit for one grammar, once it is its turn
VOCABULARY_S = 60.0  # how long a grammar waits for the vocabulary; of 262,144 tokens it takes 4 s
_NAME = "grammar-compiler"


class GrammarCompiler:
    """The grammars of one model's requests. Used on one event loop.

    The vocabulary is made for the first of them: most nodes never need it, and it takes longer than
    all else that a node does before it is ready. Meanwhile the interpreter stands still now and
    then, once in a node's life.
    """

    def __init__(
        self,
        load_vocabulary: Callable[[], Vocabulary],
        compile_s: float = COMPILE_S,
        compile_one: Callable[[Vocabulary, str], CompiledGrammar] = compile_grammar,
        vocabulary_s: float = VOCABULARY_S,
    ) -> None:
        """
        Args:
            load_vocabulary: slow; called in a thread, with the first grammar.
            compile_s: time limit for one grammar, in seconds.
            compile_one: slow; called in a thread.
            vocabulary_s: how long a grammar waits for the vocabulary, in seconds.
        """
        self._load_vocabulary = load_vocabulary
        self._vocabulary_s = vocabulary_s
        self._loading: asyncio.Task[Vocabulary] | None = None  # or loaded
        self._compile_s = compile_s
        self._compile_one = compile_one
        # By `is_light`: one thread for light grammars, and one for others, which thus never delay
        # light ones.
        self._turns = {kind: Turns() for kind in (True, False)}
        self._threads = {kind: DeepThreads(1, _NAME) for kind in (True, False)}

    async def compiled(self, grammar: str, payer: str = "") -> CompiledGrammar | None:
        """Return a grammar compiled for one answer, in a turn of its payer's; None if it is empty.

        The wait for its turn ends with the request: whoever ends that cancels this.

        Raises:
            GrammarFailed: it is invalid, exceeds a limit, or was not compiled in time.
        """
        if not grammar:
            return None
        vocabulary = await self._loaded()
        kind = is_light(grammar)
        async with self._turns[kind].of(payer):
            # The thread may still be at one that was cancelled: the limit bounds both together.
            future = self._threads[kind].submit(lambda: self._compile_one(vocabulary, grammar))
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

    async def _loaded(self) -> Vocabulary:
        """Wait for the vocabulary. Raises GrammarFailed: there is none, or not in time."""
        if self._loading is None:
            self._loading = asyncio.create_task(asyncio.to_thread(self._load_vocabulary))
        try:
            async with asyncio.timeout(self._vocabulary_s):
                return await asyncio.shield(self._loading)
        except TokenizerError as error:
            raise GrammarFailed(error.message) from error
        except TimeoutError:
            raise GrammarFailed(
                f"the vocabulary, which grammars need, was not there within {self._vocabulary_s:g} "
                "s: try again when there is less load"
            ) from None
