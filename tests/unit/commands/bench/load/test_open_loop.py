"""The open-loop client against a server that refuses, breaks off, and does not answer."""

from __future__ import annotations

import asyncio
import gc
import json

import pytest
from aiohttp import web

from pdserve.commands.bench.load.client_run import Run
from pdserve.commands.bench.load.completion_stream import error_in
from pdserve.commands.bench.load.open_loop import open_loop_client
from pdserve.commands.bench.load.outcome import Outcome
from pdserve.commands.bench.load.workload import TimedRequest
from pdserve.shared.errors import ClusterError
from tests.fakes.server import (
    Answer,
    Body,
    FakeServer,
    answer_all,
    end,
    error,
    stream,
    timed,
    token,
)
from tests.unit.commands.bench.idle_machine import on_an_idle_machine

DRAIN_S = 20.0


async def run(
    answer: Answer, *requests: TimedRequest, drain_s: float = DRAIN_S
) -> tuple[FakeServer, Run]:
    async with (
        FakeServer(answer).running() as server,
        open_loop_client(server.url, server.model) as client,
    ):
        return server, await client.run(requests, "salt", drain_s)


async def outcome_of(answer: Answer, num_output: int = 3) -> Outcome:
    _, seen = await run(answer, timed(num_output=num_output))
    (outcome,) = seen.outcomes
    return outcome


async def test_a_stream_is_stamped_token_by_token() -> None:
    server, seen = await run(answer_all, timed(num_output=5))
    (outcome,) = seen.outcomes
    assert (outcome.end, outcome.num_received, outcome.error) == ("finished", 5, "")
    assert len(outcome.arrivals_s) == 5
    assert outcome.arrivals_s == sorted(outcome.arrivals_s)
    assert 0 <= outcome.sent_s <= outcome.arrivals_s[0]
    assert (outcome.prefill_node, outcome.decode_node) == ("p", "d")
    (body,) = server.bodies
    assert body == {
        "model": "m",
        "prompt": [20, 21, 22, 23],
        "max_tokens": 5,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "cache_salt": "salt",
        "skip_special_tokens": False,
        "stream_options": {"include_usage": True},
    }


async def test_several_tokens_in_one_event_are_counted() -> None:
    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        return await stream(request, token("a b"), token("c"), end(3))

    outcome = await outcome_of(answer)
    assert (outcome.end, outcome.num_received, len(outcome.arrivals_s)) == ("finished", 3, 2)


async def test_events_may_come_in_any_pieces_and_with_comments() -> None:
    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        everything = token() + b": keep-alive\n\n" + token("data: x") + token() + end(3)
        return await stream(request, *(everything[i : i + 1] for i in range(len(everything))))

    outcome = await outcome_of(answer)
    assert (outcome.end, outcome.num_received, len(outcome.arrivals_s)) == ("finished", 3, 3)


async def test_a_refusal_is_no_failure() -> None:
    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        return web.json_response(
            {"error": {"message": "too much", "code": "overloaded"}},
            status=429,
            headers={"Retry-After": "3"},
        )

    outcome = await outcome_of(answer)
    assert (outcome.end, outcome.error) == ("refused", "429 overloaded")
    assert outcome.arrivals_s == []


async def test_another_status_is_a_failure() -> None:
    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        return web.Response(status=502, text="<html>")

    outcome = await outcome_of(answer)
    assert (outcome.end, outcome.error) == ("failed", "502 ")


@pytest.mark.parametrize("end_mark", [b"", b"data: [DONE]\n\n"])
async def test_an_error_in_mid_stream_is_no_token(end_mark: bytes) -> None:
    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        return await stream(request, token(), token(), error("node_lost"), end_mark)

    outcome = await outcome_of(answer)
    assert (outcome.end, outcome.error) == ("failed", "the stream broke off: node_lost")
    assert outcome.num_received == len(outcome.arrivals_s) == 2


async def test_a_stream_that_stops_too_early_is_a_failure() -> None:
    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        return await stream(request, token(), end(1))

    outcome = await outcome_of(answer)
    assert (outcome.end, outcome.error) == ("failed", "the stream had 1 tokens")


async def test_a_stream_without_an_end_is_a_failure() -> None:
    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        return await stream(request, token())

    outcome = await outcome_of(answer)
    assert (outcome.end, outcome.error) == ("failed", "the stream broke off: without a word")


async def test_a_broken_connection_is_a_failure() -> None:
    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(token())
        assert request.transport is not None
        request.transport.abort()
        return response

    outcome = await outcome_of(answer)
    assert outcome.end == "failed"
    assert outcome.error.startswith("the connection broke")


async def test_requests_go_out_though_none_before_them_was_answered() -> None:
    """A closed loop would wait for ever: nobody is answered before the last one has come."""
    all_there = asyncio.Event()
    waiting = 0

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        nonlocal waiting
        waiting += 1
        if waiting == 20:
            all_there.set()
        await all_there.wait()
        return await answer_all(request, body)

    _, seen = await run(answer, *(timed(at_s=0.01 * i) for i in range(20)))
    assert [outcome.end for outcome in seen.outcomes] == ["finished"] * 20
    assert [outcome.due_s for outcome in seen.outcomes] == [0.01 * i for i in range(20)]
    for outcome in seen.outcomes:
        assert outcome.due_s <= outcome.sent_s  # never before it is due
        assert outcome.ttft_s >= 0.19 - outcome.due_s  # so the first one has waited longest


@on_an_idle_machine
async def test_what_still_runs_in_the_end_is_unfinished() -> None:
    hung_up = asyncio.Event()

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(token())
        try:
            await asyncio.Event().wait()
        finally:
            hung_up.set()
        return response

    _, seen = await run(answer, timed(), drain_s=0.2)
    (outcome,) = seen.outcomes
    assert (outcome.end, outcome.num_received) == ("unfinished", 1)
    async with asyncio.timeout(DRAIN_S):
        await hung_up.wait()  # the server was told


async def test_garbage_is_collected_again_after_a_run() -> None:
    was_enabled: list[bool] = []

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        was_enabled.append(gc.isenabled())
        return await answer_all(request, body)

    await run(answer, timed())
    assert was_enabled == [False]
    assert gc.isenabled()


async def test_one_by_one_waits_for_each() -> None:
    running = 0

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        nonlocal running
        running += 1
        assert running == 1
        response = await answer_all(request, body)
        running -= 1
        return response

    async with (
        FakeServer(answer).running() as server,
        open_loop_client(server.url, server.model) as client,
    ):
        outcomes = await client.one_by_one([timed(), timed()], "salt", DRAIN_S)
    assert [(outcome.end, outcome.due_s) for outcome in outcomes] == [("finished", 0.0)] * 2


async def test_an_idle_cluster_that_does_not_serve_is_told() -> None:
    async def refuse(request: web.Request, body: Body) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no", "code": "overloaded"}}, status=429)

    async def hang(request: web.Request, body: Body) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    for answer, complaint in ((refuse, "overloaded"), (hang, "within 0.1 s")):
        async with (
            FakeServer(answer).running() as server,
            open_loop_client(server.url, server.model) as client,
        ):
            with pytest.raises(ClusterError, match=complaint):
                await client.one_by_one([timed()], "salt", 0.1)


async def test_a_finish_reason_of_its_own_is_no_token() -> None:
    """As llama.cpp ends a stream."""

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        return await stream(request, token(), token(), token(), token(""), end(3))

    outcome = await outcome_of(answer)
    assert (outcome.end, outcome.num_received, len(outcome.arrivals_s)) == ("finished", 3, 3)
    assert outcome.num_prompt_counted == 1


async def test_a_last_token_without_text_is_one_by_the_servers_count() -> None:
    """As half of a character: it must not be late unseen."""

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        return await stream(request, token(), token(), token(""), token(""), end(3))

    outcome = await outcome_of(answer)
    assert (outcome.end, outcome.num_received, len(outcome.arrivals_s)) == ("finished", 3, 3)


async def test_what_comes_first_without_text_is_no_token_one_too_many() -> None:
    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        return await stream(request, *[token("")] * 2, token(), token(""), token(), end(4))

    outcome = await outcome_of(answer, num_output=4)
    assert (outcome.end, outcome.num_received, len(outcome.arrivals_s)) == ("finished", 4, 4)


async def test_without_a_count_an_event_is_a_token() -> None:
    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        return await stream(request, token(), token(), token(), token(""), b"data: [DONE]\n\n")

    outcome = await outcome_of(answer)
    assert (outcome.end, outcome.num_received, len(outcome.arrivals_s)) == ("finished", 3, 3)
    assert outcome.num_prompt_counted == 0


async def test_a_server_may_end_its_lines_as_http_does() -> None:
    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        everything = (token() * 3 + end(3)).replace(b"\n", b"\r\n")
        return await stream(request, *(everything[i : i + 1] for i in range(len(everything))))

    outcome = await outcome_of(answer)
    assert (outcome.end, outcome.num_received, len(outcome.arrivals_s)) == ("finished", 3, 3)


async def test_prompts_can_be_text_of_as_many_words() -> None:
    async with (
        FakeServer().running() as server,
        open_loop_client(server.url, server.model, sends_text=True) as client,
    ):
        await client.one_by_one([timed(num_prompt=30), timed(num_prompt=30)], "salt", DRAIN_S)
    first, second = (body["prompt"] for body in server.bodies)
    assert len(first.split()) == 30
    assert first == second


async def test_a_closed_loop_has_so_many_at_a_time() -> None:
    running = most = 0
    full = asyncio.Event()

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            full.set()
        await full.wait()
        await asyncio.sleep(0.01)  # time for a fourth one
        response = await answer_all(request, body)
        running -= 1
        return response

    async with (
        FakeServer(answer).running() as server,
        open_loop_client(server.url, server.model) as client,
    ):
        seen = await client.run_closed([timed() for _ in range(10)], "salt", 3, DRAIN_S)
    assert most == 3
    assert [outcome.end for outcome in seen.outcomes] == ["finished"] * 10
    dues_s = [outcome.due_s for outcome in seen.outcomes]
    ends_s = sorted(outcome.arrivals_s[-1] for outcome in seen.outcomes)
    assert max(dues_s[:3]) < ends_s[0]
    assert all(due_s >= end_s for due_s, end_s in zip(dues_s[3:], ends_s, strict=False))
    for outcome in seen.outcomes:
        assert outcome.e2e_s >= outcome.ttft_s > 0


async def test_a_closed_loop_that_takes_too_long_ends_unfinished() -> None:
    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with (
        FakeServer(answer).running() as server,
        open_loop_client(server.url, server.model) as client,
    ):
        seen = await client.run_closed([timed(), timed()], "salt", 1, 0.2)
    assert [outcome.end for outcome in seen.outcomes] == ["unfinished"] * 2
    assert len(server.bodies) == 1


def test_an_error_is_its_code_in_words_or_else_its_message() -> None:
    def body(code: object) -> bytes:
        return json.dumps({"error": {"message": "too long", "code": code}}).encode()

    assert [error_in(body(code)) for code in ("overloaded", 400, None)] == [
        "overloaded",
        "too long",
        "too long",
    ]
    assert error_in(b"<html>") == ""
