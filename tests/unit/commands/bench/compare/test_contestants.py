"""Other servers in a comparison: started, paused, measured, ended; and how cheaters are seen."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from pdserve.commands.bench.compare.config import CompareConfig
from pdserve.commands.bench.compare.contestants import Contestants
from pdserve.commands.bench.compare.runner import Candidate, ModeServer
from pdserve.commands.bench.load.open_loop import open_loop_client
from pdserve.commands.bench.load.outcome import Outcome, Promise
from pdserve.commands.bench.load.slo_score import score
from pdserve.commands.bench.serve.backend import parse_backends
from pdserve.shared.errors import ClusterError, ConfigError
from tests.fakes.server import Body, FakeServer, end, stream, timed, token
from tests.unit.commands.bench.idle_machine import on_an_idle_machine

PROMISE = Promise(ttft_s=0.5, tpot_s=0.02)


@asynccontextmanager
async def no_mode(candidate: Candidate, promise: Promise | None) -> AsyncIterator[ModeServer]:
    raise ClusterError(f"{candidate.mode} is a mode")
    yield FakeServer()


def contestants(*texts: str) -> Contestants:
    return Contestants(parse_backends(texts), {}, no_mode)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.long
async def test_a_server_that_is_started_is_stopped_between_its_turns(tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    command = f"{sys.executable} -m tests.fakes.backend it --port {{port}} "
    launch = contestants(f"it={command} --diary {diary}").launch
    async with launch(Candidate("it"), None) as server:
        pid = int(diary.read_text().split()[2])
        assert server.max_model_len > 0
        server.pause()
        while state(pid) != "T":
            await asyncio.sleep(0)
        server.resume()
        await server.settle()
        server.pause()
    assert "ends it" in diary.read_text(), "also one that is stopped ends in good order"


async def test_a_server_that_runs_already_is_left_alone() -> None:
    async with (
        FakeServer().running() as fake,
        contestants(f"it={fake.url}").launch(Candidate("it"), None) as server,
    ):
        assert (server.url, server.model) == (fake.url, fake.model)
        server.pause()
        await server.settle()


async def test_what_is_no_contestant_is_launched_as_a_mode() -> None:
    with pytest.raises(ClusterError, match="adaptive is a mode"):
        async with contestants("it=http://127.0.0.1:1").launch(Candidate("adaptive"), None):
            pass


async def test_a_command_that_ends_at_once_is_a_failure_of_its_own() -> None:
    launch = contestants(f"it={sys.executable} -c 'import sys; sys.exit(3)' {{port}}").launch
    with pytest.raises(ClusterError, match="it ended with exit code 3"):
        async with launch(Candidate("it"), None):
            pass


def test_names_are_modes_or_servers() -> None:
    config = CompareConfig(against=["vllm=http://127.0.0.1:1", "other=http://127.0.0.1:2"])
    assert list(config.plan.modes)[-2:] == ["vllm", "other"]
    with pytest.raises(ConfigError, match="a mode or policy has this name"):
        _ = CompareConfig(against=["adaptive=http://127.0.0.1:1"]).plan


# ---- cheaters ------------------------------------------------------------------------------------


async def measured(answer: object, num_tokens: int = 10) -> list[Outcome]:
    async with (
        FakeServer(answer).running() as fake,  # type: ignore[arg-type]
        open_loop_client(fake.url, fake.model) as client,
    ):
        run = await client.run([timed(0.0, 4, num_tokens)] * 4, "salt", 5.0)
        return run.outcomes


async def all_at_the_end(request: web.Request, body: Body) -> web.StreamResponse:
    """Token 1 at once, the others together just before their mean would be too late."""
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(token())
    await asyncio.sleep(0.8 * PROMISE.tpot_s * (body["max_tokens"] - 1))
    await response.write(token() * (body["max_tokens"] - 1) + end(body["max_tokens"]))
    await response.write_eof()
    return response


@on_an_idle_machine
async def test_bursts_are_seen_though_their_mean_is_in_time() -> None:
    tight = Promise(ttft_s=0.2, tpot_s=PROMISE.tpot_s)
    scored = score(await measured(all_at_the_end, 40), tight, 0.9)
    assert scored.attainment == 1.0
    assert scored.tokens_in_time < 0.5


@on_an_idle_machine
async def test_late_but_fast_is_late() -> None:
    async def late(request: web.Request, body: Body) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        return await stream(request, *[token()] * body["max_tokens"], end(body["max_tokens"]))

    scored = score(await measured(late), Promise(ttft_s=0.1, tpot_s=1.0), 0.9)
    assert (scored.attainment, scored.tpot_attainment) == (0.0, 1.0)


async def test_fewer_tokens_than_asked_for_and_dropped_requests_are_misses() -> None:
    async def short(request: web.Request, body: Body) -> web.StreamResponse:
        return await stream(request, token(), end(1))

    async def drop(request: web.Request, body: Body) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    for cheat in (short, drop):
        scored = score(await measured(cheat), Promise(60.0, 60.0), 0.9)
        assert (scored.attainment, scored.failed) == (0.0, 4)


@pytest.mark.parametrize(
    ("arrivals_s", "received", "in_time"),
    [
        ([0.5, 0.52, 0.54, 0.56], 4, 4.0),  # steady, and just in time
        ([0.1, 0.54, 0.55, 0.56], 4, 2.0),  # tokens 2 and 3 were due at 0.52 and 0.54
        ([0.1, 0.55], 4, 3.0),  # pieces of two: tokens 3 and 4 were due at 0.54 and 0.56
        ([0.7], 1, 0.0),
        ([], 0, 0.0),
    ],
)
def test_tokens_are_in_time_by_a_steady_stream(
    arrivals_s: list[float], received: int, in_time: float
) -> None:
    outcome = Outcome(
        kind="", due_s=0.0, num_prompt=1, num_output=4, arrivals_s=arrivals_s, num_received=received
    )
    assert PROMISE.num_in_time(outcome) == pytest.approx(in_time)
