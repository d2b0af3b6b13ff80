"""When processes that end are started again."""

import asyncio

import pytest

from pdserve.commands.cluster.child import Exit
from pdserve.commands.cluster.restarts import MOST_S, STABLE_S, Backoff, Restarts
from pdserve.shared.clock import ManualClock
from pdserve.shared.process.exit_codes import SICK


def test_the_pause_doubles_up_to_a_limit():
    backoff = Backoff(ManualClock())
    pauses = [backoff.ended() for _ in range(9)]
    assert pauses[:6] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4]
    assert pauses[6:] == [MOST_S] * 3


def test_a_minute_of_being_ready_begins_it_anew():
    clock = ManualClock()
    backoff = Backoff(clock)
    backoff.ended()
    clock.advance(10 * STABLE_S)  # it was loading all the time
    assert backoff.ended() == 0.4
    backoff.is_ready()
    clock.advance(0.9 * STABLE_S)
    assert backoff.ended() == 0.8
    backoff.is_ready()
    clock.advance(STABLE_S)
    assert backoff.ended() == 0.2
    assert backoff.ended() == 0.4


class ClusterOfOne:
    """A cluster with a process that has ended, and that the system cannot start at first."""

    def __init__(self, num_refused: int, *, on_standby: bool = False) -> None:
        self.num_refused = num_refused
        self.on_standby = on_standby
        self.exits: asyncio.Queue[Exit] = asyncio.Queue()
        self.exits.put_nowait(Exit("decode-0", 17, SICK, "device_fault: gone"))
        self.is_up = False

    async def next_exit(self) -> Exit:
        return await self.exits.get()

    def is_running(self, name: str) -> bool:
        return self.is_up

    def begins_on_standby(self, name: str) -> bool:
        return self.on_standby

    async def start_node(self, name: str, *, on_standby: bool = False) -> None:
        assert on_standby is self.on_standby
        if self.num_refused:
            self.num_refused -= 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self.is_up = True


@pytest.mark.parametrize("on_standby", [False, True])
async def test_a_process_that_cannot_be_started_now_is_tried_again_as_what_it_was(on_standby):
    said: asyncio.Queue[str] = asyncio.Queue()
    restarts = Restarts(ClusterOfOne(num_refused=1, on_standby=on_standby), said.put_nowait)
    running = asyncio.create_task(restarts.run())
    async with asyncio.timeout(30):
        assert [await said.get() for _ in range(3)] == [
            "decode-0 (pid 17) ended with exit code 3 (a node that was sick): device_fault: gone; "
            "starting it again in 0.2 s",
            "decode-0 cannot be started: [Errno 11] Resource temporarily unavailable; trying again "
            "in 0.4 s",
            "decode-0 is ready again",
        ]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
