"""Servers that compute alike must answer alike, or the comparison fails and says where."""

from __future__ import annotations

import re

import pytest
from aiohttp import web

from pdserve.commands.bench.compare.answers import Answers
from pdserve.commands.bench.compare.recompute import recomputed
from pdserve.commands.bench.compare.runner import Candidate
from pdserve.commands.bench.compare.shown.table import tables
from pdserve.commands.bench.load.outcome import Outcome
from tests.fakes.server import Answer, Body, end_of, stream, token
from tests.unit.commands.bench.compare.test_compare import PLAN, World, change

PLAIN = change(PLAN, modes=["disaggregated", "adaptive"])


def says(fingerprint: str, *, lies_of: int = -1) -> Answer:
    """Answers by the prompt; a wrong token in the middle of prompts of that many tokens."""

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        texts = [f" {body['prompt'][0] + n}" for n in range(body["max_tokens"])]
        if len(body["prompt"]) == lies_of and "-rate-" in body["cache_salt"]:
            texts[len(texts) // 2] = " no"
        pieces = [token(text, fingerprint) for text in texts]
        return await stream(request, *pieces, end_of(body))

    return answer


@pytest.mark.long
async def test_the_same_answers_are_counted_and_all_is_well() -> None:
    answers = {Candidate(mode): says("fp_1") for mode in PLAIN.modes}
    world = World(answers=answers)
    _, scenario, _ = await world.run(PLAIN)
    num_requests = sum(
        len(run.outcomes) for run in world.kept if (run.what, run.mode) == ("rate", "adaptive")
    )
    assert scenario.answers == Answers(num_compared=num_requests)
    assert world.report is not None
    assert world.report.is_sound
    assert recomputed(world.report, world.kept).scenarios[0].answers == scenario.answers


async def test_a_wrong_token_fails_the_comparison_and_is_told_by_its_place() -> None:
    world = World(answers={Candidate("disaggregated"): says("fp_1")})
    await world.run(change(PLAIN, modes=["disaggregated"]))
    length = next(run for run in world.kept if run.what == "rate").outcomes[3].num_prompt
    answers = {
        Candidate("disaggregated"): says("fp_1"),
        Candidate("adaptive"): says("fp_1", lies_of=length),
    }
    world = World(answers=answers)
    _, scenario, failures = await world.run(PLAIN)
    assert failures == {}
    assert 0 < scenario.answers.num_different < scenario.answers.num_compared
    assert re.match(
        rf"request \d+ of the run at 100/s \({length} prompt tokens, \d+ to answer\): adaptive on "
        r"p and d gave \w{16}, disaggregated on p and d \w{16}",
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


def test_what_did_not_end_is_not_compared() -> None:
    ended = Outcome(kind="chat", due_s=0.0, num_prompt=1, num_output=1, digest="a", format="fp_1")
    cut = Outcome(kind="chat", due_s=0.0, num_prompt=1, num_output=1)
    answers = Answers()
    answers.add(1.0, {"a": [cut, ended], "b": [ended, ended], "c": [ended, cut]})
    assert (answers.num_compared, answers.num_different) == (2, 0)
