"""Requests that follow others: what they extend, and when a client sends them."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from pdserve.commands.bench.compare.cases import made_up
from pdserve.commands.bench.load.open_loop import open_loop_client
from pdserve.commands.bench.load.scenarios import MODEL_LEN
from pdserve.commands.bench.load.sessions import SESSIONS
from pdserve.commands.bench.load.traces import TraceRow
from pdserve.commands.bench.load.workload import TimedRequest, TraceWorkload
from pdserve.shared.errors import ConfigError
from tests.fakes.server import Body, FakeServer, answer_all
from tests.unit.commands.bench.idle_machine import on_an_idle_machine

CHAT = [
    TraceRow(0.0, 70, 8, (0, 1), 64),
    TraceRow(1.0, 200, 8, (7, 8, 9), 64),
    TraceRow(5.0, 150, 8, (0, 1, 2), 64, follows=0, think_s=2.5),
    TraceRow(6.0, 300, 8, (0, 1, 2, 3, 4), 64, follows=2, think_s=0.5),
    TraceRow(7.0, 150, 8, (0, 1, 5), 64, follows=0, think_s=3.0),
    TraceRow(8.0, 64, 8, (11,), 64),
]


def test_a_conversation_comes_whole_behind_its_first_request() -> None:
    requests = TraceWorkload(CHAT, 1.0, MODEL_LEN, seed=0).timed(0.625, 6)  # as recorded
    assert [r.at_s for r in requests] == pytest.approx([0, 0, 0, 0, 1, 8])
    assert [r.after for r in requests] == [None, 0, 1, 0, None, None]
    assert [r.think_s for r in requests] == [0, 2.5, 0.5, 3.0, 0, 0]
    first, second, third, branch = (request.prompt for request in requests[:4])
    assert second[:70] == first
    assert third[:150] == second
    assert branch[:128] == second[:128]
    assert branch[128:] != second[128:]


def test_who_follows_a_request_that_is_not_sent_follows_nobody() -> None:
    sketches = list(TraceWorkload(CHAT, 1.0, MODEL_LEN, seed=0).sketched(1.0, 4, turn=1))
    assert [sketch.number for sketch in sketches] == [1, 2, 3, 4]
    assert [sketch.after for sketch in sketches] == [None, None, 2, None]
    assert sketches[1].think_s == 0.0


@pytest.mark.parametrize("name", SESSIONS)
def test_prompts_of_a_session_grow_and_sessions_share_the_system_prompt(name: str) -> None:
    rows = SESSIONS[name].rows(300, MODEL_LEN, 1.0, seed=3)
    assert rows == SESSIONS[name].rows(300, MODEL_LEN, 1.0, seed=3)
    assert [row.at_s for row in rows] == sorted(row.at_s for row in rows)
    for row in rows:
        assert len(row.blocks) == -(-row.num_prompt // 64)
        assert row.num_prompt + row.num_output <= MODEL_LEN
        if row.follows is not None:
            before = rows[row.follows]
            assert row.num_prompt > before.num_prompt + before.num_output
            assert row.blocks[: len(before.blocks)] == before.blocks
            assert row.think_s > 0
    firsts = [row.blocks for row in rows if row.follows is None]
    assert len(firsts) > 10
    num_shared = SESSIONS[name].system // 64
    assert len({blocks[:num_shared] for blocks in firsts}) == 1
    assert len({blocks[num_shared:] for blocks in firsts}) == len(firsts)


def test_runs_are_long_enough_for_sessions_to_end_in_them() -> None:
    case = made_up("chats", MODEL_LEN, 0.0, seed=0)  # type: ignore[arg-type]
    assert case.least_s > 60
    assert case.count_at(2.0, 10) >= 2.0 * case.least_s
    with pytest.raises(ConfigError, match="a first turn of agents does not fit"):
        made_up("agents", 2000, 4.0, seed=0)  # type: ignore[arg-type]


@on_an_idle_machine
async def test_a_follower_is_sent_when_its_user_has_thought() -> None:
    """Answers take 0.4 s; the second request is due 0.1 s after the end of the first one."""

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        await asyncio.sleep(0.4)
        return await answer_all(request, body)

    requests = [
        TimedRequest(0.0, "chat", [20], 2),
        TimedRequest(0.0, "chat", [20, 21], 2, after=0, think_s=0.1),
        TimedRequest(0.0, "chat", [20, 21, 22], 2, after=1, think_s=0.0),
        TimedRequest(0.02, "chat", [30], 2),
    ]
    async with (
        FakeServer(answer).running() as server,
        open_loop_client(server.url, server.model) as client,
    ):
        seen = await client.run(requests, "salt", 1.2)  # each; the last one ends after 1.3 s
    assert [outcome.end for outcome in seen.outcomes] == ["finished"] * 4
    assert [body["prompt"] for body in server.bodies] == [[20], [30], [20, 21], [20, 21, 22]]
    first, second, third, _ = seen.outcomes
    assert first.arrivals_s[-1] + 0.1 <= second.due_s <= second.sent_s
    assert third.due_s >= second.arrivals_s[-1]
    assert second.ttft_s == second.arrivals_s[0] - second.due_s


async def test_who_would_follow_too_late_is_no_part_of_the_run() -> None:
    """Nor are those behind; and nobody waits for them."""
    requests = [
        TimedRequest(0.0, "chat", [20], 2),
        TimedRequest(0.0, "chat", [20, 21], 2, after=0, think_s=0.01),
        TimedRequest(0.0, "chat", [20, 21, 22], 2, after=1, think_s=1e4),
        TimedRequest(0.0, "chat", [20, 21, 22, 23], 2, after=2, think_s=0.0),
        TimedRequest(0.02, "chat", [30], 2),
    ]
    async with (
        FakeServer(answer_all).running() as server,
        open_loop_client(server.url, server.model) as client,
    ):
        seen = await client.run(requests, "salt", 60.0, stop_s=1e3)
    assert [outcome.num_prompt for outcome in seen.outcomes] == [1, 2, 1]
    assert [outcome.end for outcome in seen.outcomes] == ["finished"] * 3
