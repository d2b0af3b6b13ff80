"""Servers that compute alike must answer alike, or the comparison fails and says where."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from unittest.mock import Mock

import msgspec
import pytest
from aiohttp import web
from msgspec.structs import replace

from pdserve.commands.bench.compare.answers import Answers
from pdserve.commands.bench.compare.config import Tuning
from pdserve.commands.bench.compare.recompute import recomputed
from pdserve.commands.bench.compare.runner import Candidate
from pdserve.commands.bench.compare.shown.table import tables
from pdserve.commands.bench.compare.sweep import WARM_UP, SweepResult
from pdserve.commands.bench.load.completion_stream import read_stream
from pdserve.commands.bench.load.outcome import Outcome
from tests.fakes.server import Answer, Body, end, stream, token
from tests.matrix import matrix
from tests.unit.commands.bench.compare.test_compare import PLAN, World, change

PLAIN = change(PLAN, modes=["disaggregated", "adaptive"])


Lie = Callable[[list[str]], None]


def wrong(texts: list[str]) -> None:
    """In the middle."""
    texts[len(texts) // 2] = " no"


def cut(texts: list[str]) -> None:
    """Also in the count."""
    del texts[-1]


def says(fingerprint: str, lie: Lie | None = None, *, of: int = -1) -> Answer:
    """Answers by the prompt; `lie` changes answers to prompts of that many tokens, at a rate."""

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        texts = [f" {body['prompt'][0] + n}" for n in range(body["max_tokens"])]
        if lie is not None and len(body["prompt"]) == of and "-rate-" in body["cache_salt"]:
            lie(texts)
        pieces = [token(text, fingerprint) for text in texts]
        return await stream(request, *pieces, end(len(texts), len(body["prompt"])))

    return answer


@pytest.mark.long
async def test_the_same_answers_are_counted_and_all_is_well() -> None:
    answers = {Candidate(mode): says("fp_1") for mode in PLAIN.modes}
    world = World(answers=answers)
    _, scenario, _ = await world.run(PLAIN)
    num_requests = sum(
        len(run.outcomes) for run in world.kept if (run.what, run.mode) == ("rate", "adaptive")
    )
    num_requests += PLAIN.warm_up
    assert scenario.answers == Answers(num_compared=num_requests)
    assert world.report is not None
    assert world.report.is_sound
    assert recomputed(world.report, world.kept).scenarios[0].answers == scenario.answers


@pytest.mark.parametrize(("lie", "said"), matrix([(wrong, ""), (cut, r" \(\d+ tokens\)")], 1))
async def test_a_wrong_answer_fails_the_comparison_and_is_told_by_its_place(
    lie: Lie, said: str
) -> None:
    world = World(answers={Candidate("disaggregated"): says("fp_1")})
    await world.run(change(PLAIN, modes=["disaggregated"]))
    length = next(run for run in world.kept if run.what == "rate").outcomes[3].num_prompt
    answers = {
        Candidate("disaggregated"): says("fp_1"),
        Candidate("adaptive"): says("fp_1", lie, of=length),
    }
    world = World(answers=answers)
    _, scenario, failures = await world.run(PLAIN)
    assert failures == {}
    assert 0 < scenario.answers.num_different < scenario.answers.num_compared
    assert re.match(
        rf"request \d+ of the run at 100/s \({length} prompt tokens, \d+ to answer\): adaptive on "
        rf"p and d gave \w{{16}}{said}, disaggregated on p and d \w{{16}}",
        scenario.answers.differences[0],
    )
    assert world.report is not None
    assert not world.report.is_sound
    told = [text for text in tables(world.report) if isinstance(text, str)]
    assert any("answers differ, and must not" in text for text in told)


@pytest.mark.long
async def test_other_formats_are_held_against_nobody() -> None:
    answers = {
        Candidate("disaggregated"): says("fp_1"),
        Candidate("adaptive"): says("fp_1"),
        Candidate("llama.cpp"): says("b99"),
        Candidate("silent"): says(""),
    }
    plan = change(PLAN, modes=["disaggregated", "adaptive", "llama.cpp", "silent"])
    world = World(answers=answers)
    _, scenario, _ = await world.run(plan)
    assert scenario.answers.num_different == 0
    assert scenario.answers.num_compared
    assert set(scenario.answers.alone) == {"llama.cpp", "silent"}


@pytest.mark.long  # that ids count is tested below
async def test_other_tokens_of_the_same_text_are_told_of_the_warm_up() -> None:
    """Only then servers are asked for ids, which cost them time."""

    def says_ids(number: int) -> Answer:
        async def answer(request: web.Request, body: Body) -> web.StreamResponse:
            pieces = [token(" a", "fp_1")] * body["max_tokens"]
            if body.get("return_token_ids"):
                assert "-warm-up-" in body["cache_salt"]
                told = b'"token_ids": [%d], "text"' % number
                pieces[0] = pieces[0].replace(b'"text"', told)
            return await stream(request, *pieces, end(len(pieces), len(body["prompt"])))

        return answer

    answers = {Candidate("disaggregated"): says_ids(4), Candidate("adaptive"): says_ids(5)}
    _, scenario, _ = await World(answers=answers).run(PLAIN)
    assert scenario.answers.num_different == 1
    assert scenario.answers.differences[0].startswith("request 0 of the warm-up (")


ENDED = Outcome(kind="chat", due_s=0.0, num_prompt=1, num_output=1, digest="a", format="fp_1")


def test_what_a_mode_that_fails_has_answered_is_not_compared() -> None:
    """As reports that are made again have it, which know of the others alone."""
    result = SweepResult(Tuning(0))
    result.said[WARM_UP] = {"a": [ENDED], "b": [ENDED], "fails": [ENDED]}
    result.said[4.0, 1] = {"b": [ENDED], "fails": [ENDED]}
    assert result.answers == Answers(num_compared=3)
    result.drop("fails")
    assert result.answers == Answers(num_compared=1)


def test_what_did_not_end_is_not_compared() -> None:
    ended, broken = ENDED, Outcome(kind="chat", due_s=0.0, num_prompt=1, num_output=1)
    answers = Answers()
    answers.add("a run", {"a": [broken, ended], "b": [ended, ended], "c": [ended, broken]})
    assert (answers.num_compared, answers.num_different) == (2, 0)


def test_who_changes_its_format_in_a_run_is_told() -> None:
    """Otherwise a wrong answer under another name would be held against nobody."""
    ended = Outcome(kind="chat", due_s=0.0, num_prompt=1, num_output=1, digest="a", format="fp_1")
    other = replace(ended, digest="b", format="fp_2")
    answers = Answers()
    answers.add("a run", {"a": [ended, ended], "b": [ended, other], "c": [ended, ended]})
    assert (answers.num_compared, answers.num_different) == (2, 1)
    assert answers.differences == ["b had 2 formats in a run: fp_1, fp_2"]


async def answer_of(*events: object) -> Outcome:
    """What a client makes of a stream of these."""

    async def pieces() -> AsyncIterator[bytes]:
        for event in events:
            yield b"data: " + msgspec.json.encode(event) + b"\n\n"
        yield end(2)

    outcome = Outcome(kind="chat", due_s=0.0, num_prompt=1, num_output=2)
    await read_stream(Mock(iter_any=pieces), outcome, 0.0)
    return outcome


def said(text: str, index: int = 0) -> dict[str, object]:
    return {"choices": [{"index": index, "text": text}]}


async def test_an_answer_is_known_by_its_choices_not_by_how_they_came() -> None:
    usual = await answer_of(said(" a", 0), said(" b", 1))
    assert (await answer_of(said(" b", 1), said(" a", 0))).digest == usual.digest
    assert (await answer_of(said(" b", 0), said(" a", 1))).digest != usual.digest
    with_ids = {"choices": [{"index": 0, "text": " a", "token_ids": [7]}]}
    assert (await answer_of(with_ids, said(" b", 1))).digest != usual.digest
