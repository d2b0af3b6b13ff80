"""Several answers to one prompt on one decode node: its KV comes once, whatever becomes of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdserve.protocol import HandoffEnded, Subscribe
from pdserve.shared.errors import StaleTicket
from tests.unit.decode_node.test_intake import (
    Bench,
    check_ended,
)
from tests.waits import turn

NAMES = ("r", "r-1", "r-2")


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    check_ended(bench)


async def taking(bench: Bench) -> dict[str, asyncio.Task[None]]:
    """All of them, whose prompt is there at once."""
    tasks = {
        name: bench.take(name, sibling_of="" if name == "r" else "r") for name in reversed(NAMES)
    }
    await turn()
    for name in NAMES:
        bench.announce(0, 8, request_id=name)
        bench.announce(8, 10, request_id=name)
        bench.record(name)
    await turn()
    return tasks


async def test_the_first_pulls_the_others_take_its_blocks(bench: Bench) -> None:
    tasks = await taking(bench)
    assert len(bench.puller.pulled) == 1, "the others wait for it"
    subscribed = [m for m in bench.exporter.outbox.sent if isinstance(m, Subscribe)]
    assert [m.at_end for m in subscribed] == [False, True, True]
    bench.puller.gate.set()
    await asyncio.wait_for(asyncio.gather(*tasks.values()), 30)
    asked = [(part[:2], from_token) for part, _, from_token in bench.puller.pulled]
    assert asked[:2] == [((0, 8), 0), ((8, 10), 8)]
    later = [end for (_, end), _ in asked[2:]], {from_token for _, from_token in asked[2:]}
    assert later[1] == {8}, "what is pulled again is the last block"
    tables = [request.block_table for request in bench.engine.queues.running]
    assert len(tables) == len(NAMES)
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == len(NAMES), "each writes to a block of its own"
    assert bench.exporter.settled == [True] * len(NAMES)


async def test_if_the_first_fails_another_one_is_the_first(bench: Bench) -> None:
    tasks = await taking(bench)
    bench.puller.error = StaleTicket("block 7 changed hands")
    bench.puller.gate.set()
    bench.puller.gate.clear()  # for those who wait there by now, and nobody else
    with pytest.raises(StaleTicket):
        await asyncio.wait_for(tasks["r-2"], 30)
    bench.puller.error = None
    await turn()
    assert len(bench.puller.pulled) == 2, "the third waits again"
    bench.puller.gate.set()
    await asyncio.wait_for(asyncio.gather(tasks["r"], tasks["r-1"]), 30)
    assert len(bench.engine.queues.running) == 2


async def test_nobody_waits_for_a_handoff_that_is_over(bench: Bench) -> None:
    tasks = await taking(bench)
    ended = HandoffEnded(request_id="r", code=StaleTicket.code, message="gone")
    bench.exporter.say(ended)
    with pytest.raises(StaleTicket, match="gone"):
        await asyncio.wait_for(tasks["r"], 30)
    tasks["r-1"].cancel("a test")
    await asyncio.gather(tasks["r-1"], return_exceptions=True)
    bench.puller.gate.set()
    await asyncio.wait_for(tasks["r-2"], 30)
    assert len(bench.engine.queues.running) == 1
