"""Nodes whose engine hangs or whose device fails, while their heartbeats go on."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

import aiohttp
import grpc.aio
import pytest
import pytest_asyncio
from grpc.aio import insecure_channel
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from pdserve.engine.model_runner import ModelStep
from pdserve.node import engine_watch
from pdserve.shared.process.exit_codes import SICK
from pdserve.wire.outbox import running
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import HEARD_S, Fleet, fleet_config
from tests.cluster.forked import ForkedChild
from tests.cluster.prompts import make_prompt
from tests.matrix import matrix
from tests.waits import until

ServingStatus = HealthCheckResponse.ServingStatus
FLOOR_S = 1.0  # instead of the product's, for these tests to be short
HANG, FAIL, HOLD = signal.SIGUSR1, signal.SIGUSR2, signal.SIGVTALRM
STREAMED = 300  # tokens of an output that takes a while


def obey() -> None:
    """In the node's process: from a signal on, its steps never end, or its GPU is lost.

    With HOLD, they keep the interpreter's lock as well.
    """
    asked: list[int] = []
    for number in (HANG, FAIL, HOLD):
        signal.signal(number, lambda number, _: asked.append(number))
    compute = ModelStep.launch

    def compute_or_not(self: ModelStep) -> None:
        if HANG in asked:
            threading.Event().wait()
        if HOLD in asked:
            ctypes.PyDLL(None).pause()
        if FAIL in asked:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        compute(self)

    ModelStep.launch = compute_or_not  # type: ignore[method-assign]
    engine_watch.FLOOR_S = engine_watch.LONG_FLOOR_S = FLOOR_S


class ObedientChild(ForkedChild):
    def _prepare(self, words: list[str]) -> Callable[[], None] | None:
        return obey if "--node-id=decode-0" in words else None


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(tiny_checkpoint: Path) -> AsyncIterator[Fleet]:
    """Two nodes that are members for half a minute, however silent they are."""
    config = fleet_config(tiny_checkpoint, mode="colocated", decode=2)
    fleet = Fleet(config, make_child=ObedientChild)
    try:
        await fleet.spawn()
        await fleet.wait_ready()
        yield fleet
    finally:
        await fleet.kill()


def kept_busy(client: Client) -> AbstractAsyncContextManager[None]:
    """Both nodes have steps, although the streams may have ended before a signal is there."""

    async def ask(seed: int) -> None:
        while True:
            await client.complete(make_prompt(30, seed), STREAMED)

    return running(*(ask(10 + i) for i in range(4)))


async def sick_nodes(fleet: Fleet) -> dict[str, float]:
    """How many the coordinator has counted, by reason."""
    async with aiohttp.ClientSession() as session, session.get(f"{fleet.url}/metrics") as response:
        text = await response.text()
    lines = [line for line in text.splitlines() if line.startswith("pdserve_nodes_sick_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


class Health:
    """What a node's gRPC health service says, change by change, until the node ends."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._watch = HealthStub(channel).Watch(HealthCheckRequest())

    async def read(self) -> str:
        answer = await self._watch.read()
        return "" if answer is grpc.aio.EOF else ServingStatus.Name(answer.status)

    async def rest(self) -> list[str]:
        answers: list[str] = []
        with suppress(grpc.aio.AioRpcError):
            while answer := await self.read():
                answers.append(answer)
        return answers


@pytest.mark.parametrize(
    ("asked", "reason", "why"),
    matrix(
        [
            (FAIL, "device_fault", "CUDA error: an illegal memory access"),
            (HANG, "engine_stuck", "has not "),  # run, or ended: whichever is certain first
        ],
        1,
    ),
)
async def test_it_says_so_and_ends_and_is_let_in_again(
    pair: Fleet, asked: signal.Signals, reason: str, why: str
) -> None:
    before = await sick_nodes(pair)
    node = (await pair.status()).node("decode-0")
    assert node is not None
    async with Client(pair.url) as client, insecure_channel(node.session_address) as channel:
        health = Health(channel)
        assert await health.read() == "SERVING"
        streams = [Follower(client, make_prompt(30, i), STREAMED) for i in range(4)]
        outputs = await asyncio.gather(*(stream.reached(3) for stream in streams))
        assert {output.decode_node for output in outputs} == set(pair.node_names)
        pair.send_signal("decode-0", asked)
        async with kept_busy(client), asyncio.timeout(HEARD_S):
            end = await pair.next_exit()
        assert (end.name, end.returncode) == ("decode-0", SICK)
        assert end.last_line.startswith(f"{reason}: "), end
        assert why in end.last_line
        assert await health.rest() == ["NOT_SERVING"]
        await pair.wait_gone("decode-0")
        after = await sick_nodes(pair)
        assert {
            kind: after[kind] - before[kind] for kind in after if after[kind] > before[kind]
        } == {reason: 1.0}
        said = "decode-0 is sick: " + reason
        await until(lambda: any(said in line for _, line in pair.lines))
        survivors = [
            s
            for s, output in zip(streams, outputs, strict=True)
            if output.decode_node == "decode-1"
        ]
        for survivor in survivors:
            assert len((await survivor.end()).tokens) == STREAMED
        await asyncio.gather(*(stream.end() for stream in streams))
        await pair.start_node("decode-0")
        assert (await client.complete(make_prompt(40), 5)).tokens


@pytest.mark.long  # the watchdog alone by default
async def test_a_step_that_holds_the_interpreter_ends_its_node(pair: Fleet) -> None:
    """Nobody there can say so: its links break, as if it had crashed."""
    async with Client(pair.url) as client:
        streams = [Follower(client, make_prompt(30, i), STREAMED) for i in range(4)]
        await asyncio.gather(*(stream.reached(3) for stream in streams))
        pair.send_signal("decode-0", HOLD)
        async with kept_busy(client), asyncio.timeout(HEARD_S):
            end = await pair.next_exit()
        assert (end.name, end.returncode) == ("decode-0", SICK)
        assert end.last_line.startswith("engine_stuck: "), end
        assert "Python could not say so" in end.last_line
        assert any("compute_or_not" in line for _, line in pair.lines), "where its threads were"
        for stream in streams:
            assert len((await stream.end()).tokens) == STREAMED
        await pair.start_node("decode-0")


@pytest.mark.long  # by a manual clock it does not by default
async def test_a_pause_makes_no_step_seem_long(pair: Fleet) -> None:
    """In the middle of its steps the node is stopped for far longer than they may take."""
    async with Client(pair.url) as client:
        streams = [Follower(client, make_prompt(30, i), STREAMED) for i in range(4)]
        await asyncio.gather(*(stream.reached(3) for stream in streams))
        pid = pair.pid("decode-0")
        pair.send_signal("decode-0", signal.SIGSTOP)
        await asyncio.sleep(2.5 * FLOOR_S)  # the pause itself
        pair.send_signal("decode-0", signal.SIGCONT)
        for stream in streams:
            assert len((await stream.end()).tokens) == STREAMED
    assert pair.is_running("decode-0")
    assert pair.pid("decode-0") == pid
