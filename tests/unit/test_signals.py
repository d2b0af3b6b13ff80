"""Real signals to real processes, which are busy when the second signal comes."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest

from pdserve.shared.process.signals import FORCED
from tests.matrix import matrix

PROCESS = """
import asyncio, sys, threading
import uvloop
from pdserve.shared.process.signals import StopSignals

for_ever = threading.Event().wait

async def live(busy_with):
    signals = StopSignals()
    print("alive", flush=True)
    await signals.drain.wait()
    print("draining", flush=True)
    match busy_with:
        case "a thread that it waits for":  # as while loading
            await asyncio.to_thread(for_ever)
        case "a thread that outlives the main task":
            asyncio.get_running_loop().run_in_executor(None, for_ever)
        case "its event loop, from then on":
            await signals.now.wait()
            for_ever()
        case "nothing":
            await signals.now.wait()

uvloop.run(live(sys.argv[1]))
"""


@pytest.mark.parametrize("second", matrix([signal.SIGTERM, signal.SIGINT], 1))
async def test_a_second_signal_ends_a_process_whatever_it_is_busy_with(second) -> None:
    codes = {
        "a thread that it waits for": FORCED,
        "a thread that outlives the main task": FORCED,
        "its event loop, from then on": FORCED,
        "nothing": 0,
    }
    async with asyncio.timeout(30):
        ends = await asyncio.gather(*(exit_code(busy_with, second) for busy_with in codes))
    assert dict(zip(codes, ends, strict=True)) == codes


async def exit_code(busy_with: str, second: signal.Signals) -> int:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROCESS, busy_with, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"alive\n"
        process.send_signal(signal.SIGTERM)
        assert await process.stdout.readline() == b"draining\n"
        process.send_signal(second)
        return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
