"""Servers under the same load: what is sent, in what order, and what it comes to."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from aiohttp import web

from pdserve.commands.bench.load.client_run import Run
from pdserve.commands.bench.load.outcome import End, Outcome
from pdserve.commands.bench.serve.config import Load, ServePlan
from pdserve.commands.bench.serve.report import ServeReport, serve_ratio, serve_row
from pdserve.commands.bench.serve.rounds import open_targets, requests_of, serve, warm_up_prompt
from pdserve.shared.errors import ClusterError, ConfigError
from tests.fakes.server import Body, FakeServer, answer_all, stream

FOUR, RATE = Load(concurrency=4), Load(rate=50.0)


def plan(*loads: Load, **changes: object) -> ServePlan:
    fields = {
        "loads": loads or (FOUR,),
        "prompt_tokens": 8,
        "output_tokens": 3,
        "num_requests": 6,
        "rounds": 2,
        "seed": 0,
        "round_s": 30.0,
    }
    return ServePlan(**fields | changes)  # type: ignore[arg-type]


def test_no_prompt_comes_twice() -> None:
    both = plan(FOUR, RATE)
    prompts = [
        tuple(request.prompt)
        for load in both.loads
        for number in range(both.rounds)
        for request in requests_of(both, load, number)
    ]
    prompts.append(tuple(warm_up_prompt(both)))
    assert len(set(prompts)) == len(prompts) == 25
    assert {len(prompt) for prompt in prompts} == {8}


def test_requests_are_the_same_for_a_seed() -> None:
    assert requests_of(plan(), FOUR, 1) == requests_of(plan(), FOUR, 1)
    assert requests_of(plan(), FOUR, 1) != requests_of(plan(seed=1), FOUR, 1)


def test_how_many_there_are() -> None:
    assert len(requests_of(plan(num_requests=0), FOUR, 0)) == 16
    one = Load(concurrency=1)
    assert len(requests_of(plan(one, num_requests=0), one, 0)) == 8


def test_arrivals_are_those_of_the_rate() -> None:
    requests = requests_of(plan(RATE, num_requests=2000), RATE, 0)
    times = [request.at_s for request in requests]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2000 / 50, rel=0.1)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.04)


@pytest.mark.parametrize("load", [FOUR, RATE])
async def test_two_servers_get_the_same_and_take_turns(load: Load) -> None:
    told: list[str] = []
    async with (
        FakeServer().running() as a,
        FakeServer(model="n").running() as b,
        open_targets([a.url + "/v1/", b.url], [], plan(load)) as targets,
    ):
        report = ServeReport([], [])
        await serve(targets, plan(load), report, told.append)
    assert [line.rpartition(" ")[2] for line in told] == [a.url, b.url, b.url, a.url]
    assert [body["model"] for body in a.bodies] == ["m"] * 13
    assert [body["model"] for body in b.bodies] == ["n"] * 13
    sent_a, sent_b = ([body["prompt"] for body in server.bodies[1:]] for server in (a, b))
    assert sorted(sent_a) == sorted(sent_b)
    assert [(row.server, row.sent, row.finished, row.failed) for row in report.rows] == [
        (a.url, 12, 12, 0),
        (b.url, 12, 12, 0),
    ]
    (ratio,) = report.ratios
    assert ratio.server == b.url
    assert ratio.output_tokens_per_s is not None
    assert report.rows[0].prompt_tokens == 8.0  # as the fake counts
    assert report.rows[0].tokens_per_piece == 1.0


async def test_a_server_without_token_ids_gets_text() -> None:
    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        if not isinstance(body["prompt"], str):
            return web.json_response({"error": {"message": "text, please"}}, status=422)
        return await answer_all(request, body)

    async with (
        FakeServer(answer).running() as server,
        open_targets([server.url], [], plan()) as targets,
    ):
        report = ServeReport([], [])
        await serve(targets, plan(rounds=1), report)
    assert [type(body["prompt"]) for body in server.bodies] == [list] + [str] * 7
    assert report.rows[0].finished == 6


async def test_a_server_that_serves_neither_is_told() -> None:
    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=500)

    async with FakeServer(answer).running() as server:
        with pytest.raises(
            ClusterError, match=r"neither a prompt of token ids \(.*500 no\) nor one of text"
        ):
            async with open_targets([server.url], ["m"], plan()):
                pass


async def test_no_connection_is_used_twice() -> None:
    """A server may close it after a stream; the next request would then be lost on its way."""
    ports: list[int] = []

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        return await answer_all(request, body)

    async with (
        FakeServer(answer).running() as server,
        open_targets([server.url], [], plan()) as targets,
    ):
        await serve(targets, plan(), ServeReport([], []))
    assert len(set(ports)) == len(ports) == 13


async def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(ClusterError, match="does not list its models"):
        async with open_targets(["http://127.0.0.1:1"], [], plan()):
            pass


async def test_models_and_urls_must_match() -> None:
    with pytest.raises(ConfigError, match="2 models for 1 urls"):
        async with open_targets(["http://127.0.0.1:1"], ["a", "b"], plan()):
            pass


async def test_requests_that_fail_are_counted_and_told() -> None:
    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        if body["max_tokens"] == 3 and body["prompt"][0] % 2:
            return await stream(request)
        return await answer_all(request, body)

    async with (
        FakeServer(answer).running() as server,
        open_targets([server.url], [], plan()) as targets,
    ):
        report = ServeReport([], [])
        await serve(targets, plan(), report)
        (row,) = report.rows
    odd = sum(body["prompt"][0] % 2 for body in server.bodies[1:])
    assert 0 < odd < 12
    assert (row.finished, row.failed) == (12 - odd, odd)
    assert row.errors == {"the stream broke off: without a word": odd}


def outcome(*arrivals_s: float, due_s: float = 0.0, end: End = "finished") -> Outcome:
    return Outcome(
        kind="bench",
        due_s=due_s,
        num_prompt=8,
        num_output=3,
        sent_s=due_s,
        arrivals_s=list(arrivals_s),
        num_received=len(arrivals_s),
        end=end,
    )


def test_figures_of_rounds() -> None:
    quick = Run([outcome(1.0, 2.0, 3.0), outcome(2.0, 3.0, 4.0, due_s=1.0)], [0.0], 4.0, 1.0)
    slow = Run([outcome(2.0, 4.0, 6.0), outcome(end="unfinished")], [0.0], 6.0, 1.0)
    row = serve_row("u", "m", Load(concurrency=2), [quick, slow])
    assert row.output_tokens_per_s == pytest.approx((6 / 4 + 3 / 6) / 2)
    assert row.requests_per_s == pytest.approx((2 / 4 + 1 / 6) / 2)
    assert (row.sent, row.finished, row.failed) == (4, 3, 1)
    assert row.ttft_ms.p50 == pytest.approx(1000)
    assert row.tpot_ms.p50 == pytest.approx(1000)
    assert row.e2e_ms.p50 == pytest.approx(3000)
    assert row.itl_ms.p50 == pytest.approx(1000)
    assert row.client_core_share == pytest.approx(0.2)
    assert row.errors == {"not ended in time": 1}


def test_ratios_are_those_of_neighbours() -> None:
    def one(scale: float) -> Run:
        return Run([outcome(scale, 2 * scale, 3 * scale)], [], scale, 0.0)

    ratio = serve_ratio("u", FOUR, [one(1), one(10), one(1)], [one(2), one(20), one(3)])
    assert ratio.output_tokens_per_s == pytest.approx(1 / 2)
    assert ratio.ttft_p50 == pytest.approx(2)
    assert ratio.tpot_p50 == pytest.approx(2)


def test_a_server_that_served_nothing_has_no_ratios() -> None:
    nothing = Run([outcome(end="unfinished")], [], 1.0, 0.0)
    something = Run([outcome(1.0, 2.0, 3.0)], [], 1.0, 0.0)
    assert nothing.outcomes[0].e2e_s == inf
    ratio = serve_ratio("u", FOUR, [nothing], [something])
    assert (ratio.output_tokens_per_s, ratio.ttft_p50, ratio.tpot_p50) == (None, None, None)
