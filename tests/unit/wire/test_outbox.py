"""What runs beside a stream's reader, and how the two end."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.errors import MalformedMessage
from pdserve.wire.outbox import running


async def test_the_bodys_error_comes_out_as_it_is() -> None:
    async def converse() -> None:
        async with running(asyncio.sleep(60)):
            await asyncio.sleep(0)  # so that it has begun
            raise MalformedMessage("nonsense")

    with pytest.raises(MalformedMessage):
        await converse()


async def test_a_companions_error_ends_the_body() -> None:
    async def fail() -> None:
        raise MalformedMessage("nonsense")

    async with asyncio.timeout(5):
        with pytest.raises(MalformedMessage):
            async with running(fail()):
                await asyncio.sleep(60)


async def test_a_cancellation_is_not_lost_while_an_error_is_on_its_way_out() -> None:
    landing = asyncio.Event()
    landed = asyncio.Event()

    async def land() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            landing.set()
            await landed.wait()

    async def converse() -> None:
        async with running(land()):
            await asyncio.sleep(0)  # so that it has begun
            raise MalformedMessage("nonsense")

    task = asyncio.create_task(converse())
    async with asyncio.timeout(5):
        await landing.wait()
        task.cancel()
        landed.set()
        with pytest.raises(asyncio.CancelledError):
            await task
