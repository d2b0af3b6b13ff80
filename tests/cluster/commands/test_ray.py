"""`pdserve up --on ray` on a Ray cluster of three machines, all of them here."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic

import psutil
import pytest
import pytest_asyncio
from msgspec.structs import replace

from pdserve import _native
from pdserve.commands.cluster.child import Child
from pdserve.commands.cluster.status import fetch_status
from pdserve.settings.flags import as_flags
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client
from tests.cluster.commands.ray_up import (
    STARTED_S,
    STOP_S,
    Machines,
    Up,
    machine_of,
    machines,
    processes,
    serving,
)
from tests.cluster.fleet import Fleet, fleet_config, poll, running

__all__ = ["machines"]  # a fixture
ENGINE = {"kernels": _native.kernel_variants()[0]}
PLACED_S = 30.0  # within which Ray starts an actor for which it has room, however busy a machine is
pytestmark = pytest.mark.timeout(900)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(tiny_checkpoint: Path) -> AsyncIterator[Client]:
    """Of a plain cluster, which computes the same bits."""
    plain = Fleet(fleet_config(tiny_checkpoint, engine=ENGINE))
    async with running(plain), Client(plain.url, STARTED_S) as of_plain:
        yield of_plain


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def up(machines: Machines, tiny_checkpoint: Path) -> AsyncIterator[tuple[Up, Child, str]]:
    """As `serving`; at the end nothing is left behind."""
    async with serving(fleet_config(tiny_checkpoint, on="ray", engine=ENGINE)) as served:
        yield served
        running = processes("--node-id=")
    lines = served[0].lines
    assert not [line for line in lines if "SIGTERM received" in line], "as if it crashed"
    gone, alive = psutil.wait_procs(running, timeout=STOP_S)
    assert gone
    assert not alive
    assert not processes("--grpc-host=")


async def test_the_answers_are_those_of_a_plain_cluster(
    up: tuple[Up, Child, str], client: Client
) -> None:
    _, _, url = up
    async with Client(url, STARTED_S) as on_ray:
        for length in (7, 60, 130):
            prompt = make_prompt(length)
            answer = await on_ray.complete(prompt, 12)
            assert answer.tokens == (await client.complete(prompt, 12)).tokens
            assert (answer.prefill_node, answer.decode_node) == ("prefill-0", "decode-0")


async def test_nodes_are_spread_over_the_machines(up: tuple[Up, Child, str]) -> None:
    assert machine_of("prefill-0") != machine_of("decode-0")


async def test_a_port_that_is_taken_on_the_head_machine_is_told_also_from_outside(
    up: tuple[Up, Child, str], tiny_checkpoint: Path, machines: Machines
) -> None:
    taken = int(up[2].rpartition(":")[2])
    config = fleet_config(tiny_checkpoint, on=f"ray://127.0.0.1:{machines.client_port}")
    flags = as_flags(replace(config, port=taken, start_s=STARTED_S))
    deadline_s = monotonic() + STARTED_S
    end = await Up().start(*flags).ended()
    while "no Ray cluster" in end.last_line and monotonic() < deadline_s:
        end = await Up().start(*flags).ended()  # Ray gives who comes from outside half a minute
    assert (end.returncode, end.last_line) == (
        2,
        f"cannot listen on 127.0.0.1:{taken}: Address already in use: name another port, or 0 for "
        "any free one",
    )


async def test_what_ray_has_no_room_for_is_told(
    up: tuple[Up, Child, str], tiny_checkpoint: Path
) -> None:
    config = fleet_config(tiny_checkpoint, on="ray", decode=2)
    end = await Up().start(*as_flags(replace(config, start_s=PLACED_S))).ended()
    assert end.returncode == 1
    told = "no room for 3 nodes with 1 CPUs, .* within 30 s .*: it has 3 CPUs, .* and now 0 CPUs, "
    assert re.search(told, end.last_line), end.last_line


async def test_a_process_that_is_killed_comes_back(up: tuple[Up, Child, str]) -> None:
    (victim,) = processes("--node-id=decode-0")
    victim.kill()
    await up[0].told("decode-0 .* ended with signal SIGKILL; starting it again")
    await up[0].told("decode-0 is ready again")
    await answers(up[2])


@pytest.mark.parametrize(
    ("name", "flag"), [("prefill-0", "--node-id=prefill-0"), ("coordinator", "--grpc-host=")]
)
async def test_ray_starts_an_actor_again_that_is_killed(
    up: tuple[Up, Child, str], name: str, flag: str
) -> None:
    (process,) = processes(flag)
    actor = process.parent()
    assert actor is not None
    actor.kill()
    await up[0].told(f"{name} .* Ray has lost its actor")
    await up[0].told(f"{name} is ready again")
    assert process.wait(STOP_S) is None  # it went with its actor
    await answers(up[2])


async def test_a_node_whose_machine_is_lost_goes_to_another(
    up: tuple[Up, Child, str], machines: Machines, client: Client
) -> None:
    head, *_ = machines.raylets
    name = "decode-0" if machine_of("decode-0") != head else "prefill-0"
    former = machine_of(name)
    assert former in machines.raylets
    before = len([line for line in up[0].lines if f"{name} is ready again" in line])
    prompts = [make_prompt(length) for length in (30, 31, 90)]
    async with Client(up[2], STARTED_S) as on_ray:
        streams = [asyncio.create_task(on_ray.stream_all(prompt, 900)) for prompt in prompts]
        await poll(lambda: _runs(up[2], len(prompts)), STARTED_S, lambda: "they do not run")
        machines.lose(former)
        heard = [await stream for stream in streams]
    await up[0].told(f"{name} is ready again", before + 1)
    assert machine_of(name) != former
    for prompt, output in zip(prompts, heard, strict=True):
        assert output.error is None
        assert output.token_ids == (await client.stream_all(prompt, 900)).token_ids
    await answers(up[2])


async def _runs(url: str, number: int) -> bool:
    status = await fetch_status(url)
    return sum(node.running_requests for node in status.nodes if node.role == "decode") == number


async def answers(url: str) -> None:
    """It does, as soon as both nodes are there."""

    async def look() -> bool:
        return not (await fetch_status(url)).waiting_for(["prefill-0", "decode-0"])

    await poll(look, STARTED_S, lambda: f"{url} lacks a node")
    async with Client(url, STARTED_S) as client:
        assert len((await client.complete(make_prompt(40), 5)).tokens) == 5
