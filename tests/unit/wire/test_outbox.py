"""What runs beside a stream's reader, and how the two end."""

from __future__ import annotations

import asyncio
import inspect

import msgspec
import pytest

from pdserve.protocol import CancelLeg
from pdserve.shared.errors import MalformedMessage
from pdserve.wire.coordinator_pb2 import CoordinatorMessages
from pdserve.wire.envelopes import FROM_COORDINATOR
from pdserve.wire.outbox import Outbox, running


async def test_the_bodys_error_comes_out_as_it_is() -> None:
    async def converse() -> None:
        async with running(asyncio.sleep(60)):
            await asyncio.sleep(0)  # so that it has begun
            raise MalformedMessage("nonsense")

    with pytest.raises(MalformedMessage):
        await converse()


async def test_a_companion_of_a_body_that_ends_at_once_is_closed() -> None:
    """Its task is cancelled before it begins: nothing is left that was never awaited."""
    companion = asyncio.sleep(60)
    async with running(companion):
        pass
    assert inspect.getcoroutinestate(companion) == inspect.CORO_CLOSED


async def test_a_companions_error_ends_the_body() -> None:
    async def fail() -> None:
        raise MalformedMessage("nonsense")

    async with asyncio.timeout(30):
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
    async with asyncio.timeout(30):
        await landing.wait()
        task.cancel()
        landed.set()
        with pytest.raises(asyncio.CancelledError):
            await task


class SlowStream:
    """Whose first write ends when it is let."""

    def __init__(self) -> None:
        self.written: list[list[msgspec.Struct]] = []
        self.is_free = asyncio.Event()

    async def write(self, message: CoordinatorMessages) -> None:
        self.written.append(FROM_COORDINATOR.unwrap_all(message))
        await self.is_free.wait()


async def test_what_was_sent_during_a_write_goes_out_together_and_in_order() -> None:
    outbox, stream = Outbox(), SlowStream()
    small = [CancelLeg(request_id=f"r{n}", reason="") for n in range(5)]
    large = [CancelLeg(request_id=f"l{n}", reason="x" * 40_000) for n in range(3)]
    async with asyncio.timeout(30), running(outbox.pump(stream, FROM_COORDINATOR)):
        outbox.send(small[0])
        while not stream.written:
            await asyncio.sleep(0)
        for message in (*small[1:], *large):
            outbox.send(message)
        stream.is_free.set()
        await outbox.flush()
    assert stream.written == [small[:1], [*small[1:], *large[:2]], large[2:]]


async def test_a_message_is_finished_when_it_is_written_and_not_before() -> None:
    now = "sent"

    def finish(message: msgspec.Struct) -> msgspec.Struct:
        assert isinstance(message, CancelLeg)
        return msgspec.structs.replace(message, reason=now)

    outbox, stream = Outbox(finish), SlowStream()
    for number in range(2):
        outbox.send(CancelLeg(request_id=f"r{number}", reason=""))
    now = "written"
    stream.is_free.set()
    async with asyncio.timeout(30), running(outbox.pump(stream, FROM_COORDINATOR)):
        await outbox.flush()
    assert stream.written == [
        [CancelLeg(request_id=f"r{number}", reason="written") for number in range(2)]
    ]
