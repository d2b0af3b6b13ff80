"""Contestants that cheat, in a whole comparison: their tables and verdicts say so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

import pytest
from aiohttp import web
from rich.console import Console

from pdserve.commands.bench.compare.cases import CompareCase, made_up
from pdserve.commands.bench.compare.comparison import compare
from pdserve.commands.bench.compare.config import ComparePlan, Tuning
from pdserve.commands.bench.compare.report import CompareReport, ModeReport
from pdserve.commands.bench.compare.runner import Candidate, Experiment, ModeServer
from pdserve.commands.bench.compare.shown.suspicions import suspicions
from pdserve.commands.bench.compare.shown.table import tables
from pdserve.commands.bench.load.outcome import Outcome, Promise
from pdserve.shared.clock import SystemClock
from tests.fakes.server import (
    Answer,
    Body,
    FakeServer,
    answer_all,
    end,
    end_of,
    stream,
    token,
)
from tests.matrix import matrix
from tests.unit.commands.bench.idle_machine import on_an_idle_machine

TTFT_S, TPOT_S = 0.8, 0.02
LENGTHS = 0.4  # factor: answers of 40 tokens
PLAN = ComparePlan(
    modes=["honest", "cheat"],
    tunings=[Tuning(0)],
    ttft_s=TTFT_S,
    tpot_s=TPOT_S,
    ttft_scale=0.0,
    tpot_scale=0.0,
    target=0.9,
    seed=0,
    rates=[150.0],
    duration_s=0.1,
    least_requests=30,
    idle_requests=2,
    warm_up=1,
    budget_s=1e6,
)


async def paced(
    request: web.Request, pieces: list[bytes], each_s: float, first_s: float = 0.0
) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await asyncio.sleep(first_s)
    for number, piece in enumerate(pieces):
        if number:
            await asyncio.sleep(each_s)
        await response.write(piece)
    await response.write_eof()
    return response


def at_a_rate(cheat: Answer) -> Answer:
    """Honest while it is idle: else it would be left out at once."""

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        is_measured = "-rate-" in body["cache_salt"]
        return await (cheat if is_measured else answer_all)(request, body)

    return answer


async def late_but_fast(request: web.Request, body: Body) -> web.StreamResponse:
    num = body["max_tokens"]
    return await paced(request, [token() * num + end_of(body)], 0.0, first_s=1.5 * TTFT_S)


async def in_bursts(request: web.Request, body: Body) -> web.StreamResponse:
    """16 tokens at a time, at a mean pace that keeps the promise."""
    num = body["max_tokens"]
    sizes = [min(16, num - start) for start in range(0, num, 16)]
    pieces = [token() * size for size in sizes] + [end_of(body)]
    return await paced(request, pieces, 0.8 * TPOT_S * 16)


async def claims_more(request: web.Request, body: Body) -> web.StreamResponse:
    num = body["max_tokens"]
    return await stream(request, *[token()] * (num // 4), end_of(body))


async def stops_early(request: web.Request, body: Body) -> web.StreamResponse:
    """With finish_reason "length", and a true count."""
    num = body["max_tokens"] // 2
    last = b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}\n\n'
    return await stream(request, *[token()] * num, last, end(num))


async def says_something_first(request: web.Request, body: Body) -> web.StreamResponse:
    """Without any text, as soon as it is asked; token 1 is late."""
    num = body["max_tokens"]
    pieces = [token(""), token() * num + end_of(body)]
    return await paced(request, pieces, 1.5 * TTFT_S)


async def pads(request: web.Request, body: Body) -> web.StreamResponse:
    """With a piece that is no token, at once; the others are late, but soon enough for the TPOT."""
    num = body["max_tokens"]
    pieces = [token(" "), token() * num + end_of(body)]
    return await paced(request, pieces, 0.9 * TPOT_S * (num - 1))


async def cuts_prompts(request: web.Request, body: Body) -> web.StreamResponse:
    num = body["max_tokens"]
    return await stream(request, *[token()] * num, end(num, len(body["prompt"]) // 2))


def dropping(every: int, *pieces: bytes) -> Answer:
    """Closes the stream of some requests after these pieces, or without any."""
    numbers = count(1)

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        if next(numbers) % every:
            return await answer_all(request, body)
        if pieces:
            return await stream(request, *pieces)
        assert request.transport is not None
        request.transport.close()
        return web.StreamResponse()

    return answer


@dataclass
class Caching:
    """Keeps its answers by their prompts, whatever their salts; new ones are late."""

    num_kept: int = 0

    def __post_init__(self) -> None:
        self._seen: set[tuple[int, ...]] = set()

    async def __call__(self, request: web.Request, body: Body) -> web.StreamResponse:
        key = tuple(body["prompt"])
        if key in self._seen:
            self.num_kept += 1
            return await answer_all(request, body)
        self._seen.add(key)
        num = body["max_tokens"]
        return await paced(request, [token() * num + end_of(body)], 0.0, first_s=1.2 * TTFT_S)


async def compared(cheat: Answer) -> CompareReport:
    answers = {"honest": answer_all, "cheat": cheat}

    @asynccontextmanager
    async def launch(candidate: Candidate, promise: Promise | None) -> AsyncIterator[ModeServer]:
        async with FakeServer(answers[candidate.mode]).running() as server:
            yield server

    def cases(max_model_len: int) -> list[CompareCase]:
        return [made_up("short-prompts", max_model_len, LENGTHS, PLAN.seed)]

    report = CompareReport([], [], {}, {})
    experiment = Experiment(
        plan=PLAN,
        launch=launch,
        clock=SystemClock(),
        keep=lambda record: None,
        tell=lambda text: None,
        failures=report.failures,
    )
    await compare(experiment, cases, report)
    return report


def said(report: CompareReport) -> str:
    console = Console(width=2000)
    with console.capture() as captured:
        for table in tables(report):
            console.print(table)
    return captured.get()


def modes_of(report: CompareReport) -> tuple[ModeReport, ModeReport]:
    honest, cheat = report.modes
    assert not list(suspicions(honest)), "whoever is honest is under no suspicion"
    return honest, cheat


@pytest.mark.parametrize(
    ("cheat", "words", "is_beaten"),
    matrix(
        [
            (stops_early, ["requests, most with: the stream had", "cheat failed"], True),
            (
                in_bursts,
                ["cheat streams in bursts of about 1", "tokens: its TPOT is a mean"],
                False,
            ),
            (
                late_but_fast,
                ["cheat answers late, and fast then: at 150/s 100% kept the TPOT"],
                True,
            ),
            (claims_more, ["cheat counts 4", "tokens for each piece that it sends: nobody"], False),
            (says_something_first, ["cheat answers late, and fast then"], True),
            (pads, ["cheat sends more pieces than it counts tokens"], False),
            (cuts_prompts, ["cheat counts fewer prompt tokens than were sent, in 30 of 30"], False),
            (dropping(6), ["cheat failed", "most with: the connection broke"], True),
            (dropping(6, token()), ["most with: the stream broke off: without a word"], True),
        ],
        1,
    ),
)
@on_an_idle_machine
async def test_a_cheat_is_exposed(cheat: Answer, words: list[str], is_beaten: bool) -> None:
    report = await compared(at_a_rate(cheat))
    _, exposed = modes_of(report)
    text = said(report)
    for word in words:
        assert word in text, text
    if is_beaten:
        assert exposed.goodput_is == "below the rates"
        assert "honest keeps the promise; cheat at no rate that was measured" in text


@on_an_idle_machine
async def test_who_drops_requests_while_idle_is_left_out_with_the_reason() -> None:
    report = await compared(dropping(2))
    assert [mode.mode for mode in report.modes] == ["honest"]
    assert "cheat is missing: an idle cluster did not serve a request: the connection" in said(
        report
    )


@pytest.mark.long
@on_an_idle_machine
async def test_whoever_keeps_answers_gains_nothing() -> None:
    """Every run has prompts of its own."""
    caching = Caching()
    report = await compared(at_a_rate(caching))
    _, exposed = modes_of(report)
    assert caching.num_kept == 0
    assert [row.score.ttft_attainment for row in exposed.rows] == [0.0]


@pytest.mark.parametrize(
    ("arrivals_s", "received", "moments"),
    [
        ([0.0, 0.1, 0.2, 0.3], 4, 4),
        ([0.0, 0.0002, 0.0004, 0.9, 0.9002, 0.9004], 6, 2),  # two bursts, and a wait between them
        ([0.0, 0.001, 0.002, 0.09, 0.091, 0.092], 6, 6),  # it is shorter than what was promised
        ([0.0, *(4.0 + 0.02 * step for step in range(19))], 20, 20),  # it stalls once
        ([0.0, *(4.0 + 0.001 * step for step in range(19))], 20, 20),  # and is fast besides
        ([0.0, 0.9], 8, 2),  # pieces of four, by the server's count
        ([0.5], 1, 1),
    ],
)
def test_what_comes_together_after_a_wait_is_a_burst(
    arrivals_s: list[float], received: int, moments: int
) -> None:
    outcome = Outcome(
        kind="", due_s=0.0, num_prompt=1, num_output=received, arrivals_s=arrivals_s,
        num_received=received, end="finished",
    )  # fmt: skip
    assert outcome.num_moments(0.1) == moments
