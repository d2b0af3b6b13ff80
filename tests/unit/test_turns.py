"""Tenants take turns, each gets one at a time, and a turn of somebody who went away is not lost."""

from __future__ import annotations

import asyncio

from pdserve.shared.fair_share import Turns


async def turn() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_one_tenant_s_many_wait_behind_another_s_few() -> None:
    turns, served = Turns(), list[str]()
    may_go_on = asyncio.Event()

    async def caller(name: str) -> None:
        async with turns.of(name[0]):
            await may_go_on.wait()
            served.append(name)

    names = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
    tasks = []
    for name in names:  # all wait before anybody has finished
        tasks.append(asyncio.create_task(caller(name)))
        await turn()
    tasks[2].cancel()
    await turn()
    may_go_on.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert served == ["a1", "a2", "b1", "c1", "a4", "b2"]


async def test_a_turn_that_comes_to_somebody_who_leaves_is_passed_on() -> None:
    turns, entered = Turns(), list[str]()

    async def caller(name: str) -> None:
        async with turns.of("t"):
            entered.append(name)

    async with turns.of("t"):
        leaver, other = [asyncio.create_task(caller(name)) for name in ("leaver", "other")]
        await turn()
    leaver.cancel()  # it has the turn by now, but does not know yet
    async with asyncio.timeout(30):
        await other
        async with turns.of("t"):
            assert entered == ["other"]
