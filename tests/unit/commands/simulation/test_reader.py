"""Reading what nodes measure: of nodes that forget, that fail, and of an earlier build."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from aiohttp import web

from pdserve.commands.simulation.calibrate.samples import NodeReader, Recording
from pdserve.engine.interface import StepReport
from pdserve.measured.calibration import Drafts
from pdserve.measured.perf_model import StepShape
from pdserve.measured.samples import DraftTally, NodeSamples
from pdserve.node.reports.step_costs import SampleLog
from pdserve.protocol import StepCosts
from pdserve.shared.errors import ClusterError
from tests.fakes.http import serving
from tests.unit.commands.simulation.test_calibrate import KIND

COSTS = StepCosts(knot_tokens=[1], knot_s=[0.01])
DEADLINE_S = 20.0
EVERY_S = 0.001


def log_of(num_steps: int) -> SampleLog:
    """The log of a node that has computed so many steps."""
    log = SampleLog("d", lambda: KIND, lambda: COSTS)
    compute(log, num_steps)
    return log


def compute(log: SampleLog, num_steps: int) -> None:
    for _ in range(num_steps):
        log.stepped(StepReport([], [], 9.0, 0.001, 0.0, StepShape(1, 1, 0, 10)))


def test_drafts_are_those_of_all_nodes_and_count_up_to_the_first_wrong_one() -> None:
    recording = Recording()
    assert recording.drafts == Drafts()
    tallies = {"d": DraftTally(4, 8, 6, 1), "e": DraftTally(2, 4, 0, 2), "p": DraftTally()}
    for name, tally in tallies.items():
        log = SampleLog(name, lambda: KIND, lambda: COSTS, lambda some=tally: some)
        log.stepped(StepReport([], [], 9.0, 0.001, 0.0, StepShape(16, 16, 0, 100)))
        recording.add(msgspec.json.decode(log.since(0), type=NodeSamples))
    # 48 rows of decodes, of which 12 were guesses: streams had 36 steps, and 6 with guesses.
    assert recording.drafts == Drafts(share=6 / 36, right=6 / (6 + 3))
    assert [16 * recording.right_share(name) for name in tallies] == [14, 12, 16]
    recording.extend(recording)
    assert recording.drafts == Drafts(share=6 / 36, right=6 / (6 + 3))


async def test_drafts_of_before_are_not_counted_again() -> None:
    told = iter([DraftTally(4, 8, 6, 1), DraftTally(4, 8, 6, 1), DraftTally(9, 18, 10, 5)])
    log = SampleLog("d", lambda: KIND, lambda: COSTS, lambda: next(told))
    async with reader_of(log.since) as reader:
        await reader.read()
        assert (await reader.read()).tallies == {"d": DraftTally()}
        assert (await reader.read()).tallies == {"d": DraftTally(5, 10, 4, 4)}


@asynccontextmanager
async def reader_of(answer: Callable[[int], bytes]) -> AsyncIterator[NodeReader]:
    """A reader of one node, which answers so to the number after which it is asked."""

    async def samples(request: web.Request) -> web.Response:
        return web.Response(body=answer(int(request.query["after"])))

    async with serving(web.get("/samples", samples)) as url, aiohttp.ClientSession() as session:
        yield NodeReader(session, [url.removeprefix("http://")])


async def test_a_run_of_more_steps_than_nodes_keep_is_read_whole() -> None:
    log, was_read = SampleLog("d", lambda: KIND, lambda: COSTS, most_steps=100), asyncio.Event()

    def answer(after: int) -> bytes:
        if after and after % 80 == 0:
            was_read.set()
        return log.since(after)

    async def run() -> str:
        for _ in range(3):
            compute(log, 80)
            await was_read.wait()
            was_read.clear()
        compute(log, 80)
        return "done"

    async with asyncio.timeout(DEADLINE_S), reader_of(answer) as reader:
        result, recording = await reader.during(run(), EVERY_S)
    assert result == "done"
    assert [step.number for step in recording.steps["d"]] == list(range(1, 321))


async def test_a_run_whose_node_cannot_be_read_is_cancelled() -> None:
    was_cancelled = False

    async def run() -> None:
        nonlocal was_cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            was_cancelled = True
            raise

    async with asyncio.timeout(DEADLINE_S), reader_of(lambda _: b"no samples") as reader:
        with pytest.raises(ClusterError, match="cannot read"):
            await reader.during(run(), EVERY_S)
    assert was_cancelled


async def test_a_node_of_an_earlier_build_does_not_tell_what_it_believes() -> None:
    def answer(after: int) -> bytes:
        told = json.loads(log_of(3).since(after))
        del told["believed"]
        return json.dumps(told).encode()

    async with asyncio.timeout(DEADLINE_S), reader_of(answer) as reader:
        recording = await reader.read()
    assert recording.believed is None
    assert reader.kind == KIND
    assert len(recording.steps["d"]) == 3
