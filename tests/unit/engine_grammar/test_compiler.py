"""Compiling grammars: for each answer alone, in bounded time, no light one behind a heavy one."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
from msgspec import structs

from pdserve.engine.grammar import GrammarCompiler, GrammarProgress
from pdserve.grammar import CompiledGrammar, Vocabulary, compile_grammar, is_light
from pdserve.shared.errors import GrammarFailed, TokenizerError
from tests.unit.engine_grammar.answers import DemoModel
from tests.waits import until

AB = "start: /ab?/"
CD = "start: /cd?/"
HEAVY = ["start: /(a{1000}){1000}/", "start: /(b{1000}){1000}/"]


class SlowCompiler:
    """Compiles heavy grammars as if they were AB, when it may."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.began: list[str] = []

    def __call__(self, vocabulary: Vocabulary, grammar: str) -> CompiledGrammar:
        self.began.append(grammar)
        if not is_light(grammar):
            assert self.may_end.wait(60)
        return compile_grammar(vocabulary, AB if grammar in HEAVY else grammar)


@pytest.fixture
def slow() -> SlowCompiler:
    return SlowCompiler()


@pytest.mark.parametrize("grammar", ["start: /(/", '{"grammars": [{"json_schema": {"not": {}}}]}'])
async def test_an_invalid_grammar_is_refused(demo: DemoModel, grammar: str) -> None:
    compiler = GrammarCompiler(lambda: demo.vocabulary)
    with pytest.raises(GrammarFailed):
        await compiler.compiled(grammar)
    assert await compiler.compiled(AB) is not None
    assert await compiler.compiled("") is None


async def test_a_tokenizer_without_bytes_fails_the_requests_that_need_it() -> None:
    def no_vocabulary() -> Vocabulary:
        raise TokenizerError("it has no tokenizer.json")

    compiler = GrammarCompiler(no_vocabulary)
    for _ in range(2):
        with pytest.raises(GrammarFailed, match=r"no tokenizer\.json"):
            await compiler.compiled(AB)


async def test_the_vocabulary_is_made_for_the_first_grammar_and_waited_for_so_long(
    demo: DemoModel,
) -> None:
    made, may_end = [0], threading.Event()

    def make() -> Vocabulary:
        made[0] += 1
        assert may_end.wait(60)
        return demo.vocabulary

    compiler = GrammarCompiler(make, vocabulary_s=0.01)
    assert await compiler.compiled("") is None
    assert made == [0]
    with pytest.raises(GrammarFailed, match=r"the vocabulary.* within 0\.01 s"):
        await compiler.compiled(AB)
    compiler._vocabulary_s = 60.0
    waiting = [asyncio.create_task(compiler.compiled(one)) for one in (AB, CD)]
    may_end.set()
    assert all(await asyncio.gather(*waiting))
    assert made == [1]


async def test_who_gives_up_leaves_one_thread_to_the_others(
    demo: DemoModel, slow: SlowCompiler
) -> None:
    compiler = GrammarCompiler(lambda: demo.vocabulary, compile_one=slow)
    first, second = [asyncio.create_task(compiler.compiled(grammar)) for grammar in HEAVY]
    await until(lambda: bool(slow.began))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert await compiler.compiled(AB) is not None, "time for a second one to begin"
    assert slow.began == [HEAVY[0], AB]
    slow.may_end.set()
    assert await second is not None


async def test_waiting_for_others_does_not_count_as_compiling(demo: DemoModel) -> None:
    """The answers to one prompt compile the same grammar one after another."""
    compiler = GrammarCompiler(lambda: demo.vocabulary, compile_s=0.01)
    async with compiler._turns[True].of(""):
        waiting = asyncio.create_task(compiler.compiled(AB))
        await asyncio.sleep(0.05)
        compiler._compile_s = 60.0
    assert await waiting is not None


def test_a_search_for_repetitions_never_backtracks() -> None:
    assert is_light("{" + " " * 1300 + "," + " " * 2700)
    for heavy in ("(a{1000}){ 1000 , }", "(a{,1000}){ 3 , 1000 }", "s: (a ~ 3 .. 1000) ~1000"):
        assert not is_light(heavy)
    for light in ("(a{1000}){ 10 , 20 }", "s: a ~ 3 .. 1000"):
        assert is_light(light)


async def test_an_answer_leaves_its_states_to_no_other(demo: DemoModel) -> None:
    """Those of three answers like this are more than a matcher may have."""
    grammar = "start: /[a-c]*a[a-c]{20}/"
    letters = [token_id for letter in "abc" for token_id in demo.ids(letter)]
    compiler = GrammarCompiler(lambda: demo.vocabulary)
    for seed in range(3):
        request = demo.request("", 0, "r")
        request.sampling = structs.replace(request.sampling, grammar=grammar)
        request.grammar = await compiler.compiled(grammar)
        request.output_token_ids = random.Random(seed).choices(letters, k=9000)
        assert GrammarProgress().masks([request]) is not None


async def test_light_grammars_do_not_wait_for_heavy_ones(
    demo: DemoModel, slow: SlowCompiler
) -> None:
    compiler = GrammarCompiler(lambda: demo.vocabulary, compile_one=slow)
    waiting = [asyncio.create_task(compiler.compiled(grammar)) for grammar in HEAVY]
    await until(lambda: bool(slow.began))
    assert await compiler.compiled(AB) is not None
    assert await compiler.compiled(CD) is not None
    assert slow.began == [HEAVY[0], AB, CD], "heavy ones take turns"
    slow.may_end.set()
    assert all(await asyncio.gather(*waiting))


async def test_payers_take_turns_however_many_answers_their_calls_have(
    demo: DemoModel, slow: SlowCompiler
) -> None:
    many, one = HEAVY
    compiler = GrammarCompiler(lambda: demo.vocabulary, compile_one=slow)
    calls = [(many, "a"), (many, "a"), (many, "a"), (one, "b")]
    waiting = [asyncio.create_task(compiler.compiled(*call)) for call in calls]
    await until(lambda: bool(slow.began))
    slow.may_end.set()
    assert all(await asyncio.gather(*waiting))
    assert slow.began == [many, many, one, many]


async def test_one_that_takes_too_long_fails_alone(demo: DemoModel, slow: SlowCompiler) -> None:
    compiler = GrammarCompiler(lambda: demo.vocabulary, compile_s=0.05, compile_one=slow)
    try:
        with pytest.raises(GrammarFailed, match=r"not compiled within 0\.05 s"):
            await compiler.compiled(HEAVY[0])
        compiler._compile_s = 60.0
        released = SlowCompiler()
        released.may_end.set()
        compiler._compile_one = released
        assert await compiler.compiled(HEAVY[1]) is not None, "there is a new thread"
    finally:
        slow.may_end.set()


@pytest.mark.parametrize("chain", ["a", "A"])
async def test_a_long_chain_of_rules_overflows_no_stack(demo: DemoModel, chain: str) -> None:
    rules = "".join(f"{chain}{i}: {chain}{i + 1}\n" for i in range(4000))
    grammar = f'start: {chain}0\n{rules}{chain}4000: "ab"'
    request = demo.request("", 0, "deep")
    request.sampling = structs.replace(request.sampling, grammar=grammar)
    request.grammar = await GrammarCompiler(lambda: demo.vocabulary, compile_s=60).compiled(grammar)
    masks = GrammarProgress(mask_s=60).masks([request])
    assert masks is not None
    allowed = masks.allowed(2048, demo.node.model.device)[0].nonzero()[:, 0].tolist()
    assert {demo.tokenizer.decode([i]) for i in allowed} == {"ab"}
