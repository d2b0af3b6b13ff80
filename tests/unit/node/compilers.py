"""Compilers of grammars that end when the test says so, and what they say is compiled."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from pdserve.grammar import CompiledGrammar


def a_grammar() -> CompiledGrammar:
    """One that nobody follows: nothing is sampled with it."""
    return CompiledGrammar(cast(Any, None), cast(Any, None), is_light=True)


class SlowCompiler:
    """In place of GrammarCompiler (`pdserve.node.preparation.Compiler`)."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.error: Exception | None = None
        self.grammar = a_grammar()
        self.is_compiling = False
        self.num_compiled = 0

    async def compiled(self, grammar: str, payer: str) -> CompiledGrammar:
        self.is_compiling = True
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            for _ in range(10):  # it takes a while to end
                await asyncio.sleep(0)
            raise
        finally:
            self.is_compiling = False
        if self.error is not None:
            raise self.error
        self.num_compiled += 1
        return self.grammar
