"""Checks grammars before they go to nodes: that they can be followed, in bounded time and memory.

They are clients' texts. A check runs in a thread, with the interpreter lock released; one that
takes too long is given up and remembered, and only so many can be under way.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from coordinator.text.grammars.explain import explain
from coordinator.text.tokenizer import Tokenizer
from pdserve.errors import GrammarFailed, InvalidRequest, Overloaded, TokenizerError
from pdserve.grammar import (
    MAX_GRAMMAR_CHARS,
    DeepThreads,
    Vocabulary,
    excess,
    make_vocabulary,
    new_matcher,
)

CHECK_S = 5.0  # usually a millisecond; it holds up nobody
_NUM_THREADS = 2
_MAX_GIVEN_UP = 4  # checks that still run though nobody waits for them
_MAX_REMEMBERED = 256
_NAME = "grammar-check"
_TOO_LONG = "it takes too long to prepare"
_TOO_MANY = "too many grammars are being prepared; try again later"


class GrammarChecker:
    """For one tokenizer. Used on one event loop."""

    def __init__(self, tokenizer: Tokenizer, check_s: float = CHECK_S) -> None:
        self._tokenizer = tokenizer
        self._check_s = check_s
        self._threads = DeepThreads(_NUM_THREADS, _NAME)
        self._vocabulary: Future[Vocabulary] | None = None
        self._verdicts: OrderedDict[str, str] = OrderedDict()  # grammar |-> its fault; empty: none
        self._given_up: list[Future[str]] = []

    def begin(self) -> None:
        """Make the vocabulary. It holds the interpreter lock: best before there are requests."""
        if self._vocabulary is None:
            self._vocabulary = self._threads.submit(partial(_vocabulary_of, self._tokenizer))

    async def checked(self, make: Callable[[], str], param: str) -> str:
        """The grammar that `make` makes, in a thread.

        Raises:
            InvalidRequest: it cannot be followed; says why, and names `param`.
            Overloaded: too many others take too long.
        """
        self._given_up = [work for work in self._given_up if not work.done()]
        if len(self._given_up) >= _MAX_GIVEN_UP:
            raise Overloaded(_TOO_MANY)
        try:
            vocabulary = await self._ready()
        except TokenizerError as error:
            raise InvalidRequest(f"{param!r} cannot be enforced: {error.message}", param) from error
        grammar = await self._within(self._threads.submit(make), None)
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"what {param!r} asks for makes a grammar of {len(grammar)} characters; at most "
                f"{MAX_GRAMMAR_CHARS} are taken",
                param,
            )
        if too_much := excess(grammar):
            raise InvalidRequest(f"{param!r} cannot be enforced: {too_much}", param)
        fault = self._verdicts.get(grammar)
        if fault is None:
            fault = await self._within(
                self._threads.submit(partial(_fault, vocabulary, grammar)), grammar
            )
            self._remember(grammar, fault)
        if fault:
            raise InvalidRequest(f"{param!r} cannot be enforced: {fault}", param)
        return grammar

    async def _ready(self) -> Vocabulary:
        self.begin()
        assert self._vocabulary is not None
        return await asyncio.shield(asyncio.wrap_future(self._vocabulary))

    async def _within(self, work: Future[str], grammar: str | None) -> str:
        """Its result; when it is late, that of a grammar that takes too long."""
        try:
            async with asyncio.timeout(self._check_s):
                return await asyncio.shield(asyncio.wrap_future(work))
        except TimeoutError:
            if work.cancel():  # it waited behind others
                raise Overloaded(_TOO_MANY) from None
        self._give_up(work)
        if grammar is None:
            raise InvalidRequest(f"the grammar cannot be enforced: {_TOO_LONG}")
        return _TOO_LONG

    def _give_up(self, work: Future[str]) -> None:
        """Others get new threads; what waits for the old ones' is still done."""
        self._threads.retire()
        self._threads = DeepThreads(_NUM_THREADS, _NAME)
        self._given_up.append(work)

    def _remember(self, grammar: str, fault: str) -> None:
        self._verdicts[grammar] = fault
        if len(self._verdicts) > _MAX_REMEMBERED:
            self._verdicts.popitem(last=False)


def _vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Which token ends an answer makes no difference here; nodes know."""
    end = max(tokenizer.special_ids, default=tokenizer.num_ids)
    return make_vocabulary(tokenizer.to_json(), max(tokenizer.num_ids, end + 1), [end])


def _fault(vocabulary: Vocabulary, grammar: str) -> str:
    """Why it cannot be followed; empty: it can, to the first token at least."""
    try:
        matcher = new_matcher(vocabulary, grammar)
    except GrammarFailed as error:
        return explain(error.message)
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        return explain(matcher.get_error())
    return "" if any(mask) else "no token can begin it"
