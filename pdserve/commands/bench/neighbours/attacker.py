"""The attacker's process: `python -m` with the name of this module, its plan on stdin.

A process of its own, so that what the attacker does for its calls does not delay the neighbour's;
at the lowest priority, since on a real network that would be another machine's work. It attacks
until its standard input ends, so it cannot outlive whoever started it, and prints what became of
its calls.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from itertools import count

import aiohttp
import msgspec

from pdserve.commands.bench.load.client import open_session
from pdserve.commands.bench.neighbours.attacks import ATTACKS, WELL_BEHAVED, Attack, well_behaved
from pdserve.commands.bench.neighbours.calls import Attacker

_LOWEST = 19  # nice
_PAUSE_S = 0.05  # after a call that could not be made


class AttackPlan(msgspec.Struct, frozen=True):
    """Who attacks whom, and how."""

    attack: str  # a name in ATTACKS; empty: behave well
    url: str
    model: str
    max_model_len: int
    key: str
    first_number: int  # of the calls: another one for each attacker


async def attack(plan: AttackPlan, over: Awaitable[object]) -> dict[str, int]:
    """Attack until `over`; returns how often calls ended in which way."""
    one = ATTACKS.get(plan.attack, Attack("", well_behaved, WELL_BEHAVED))
    headers = {"Authorization": f"Bearer {plan.key}"} if one.has_key else {}
    async with open_session(headers) as session:
        attacker = Attacker(session, plan.url, plan.model, plan.max_model_len)
        numbers = count(plan.first_number)
        loops = [
            asyncio.create_task(_again_and_again(attacker, one.call, numbers))
            for _ in range(one.width)
        ]
        try:
            await over
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
    return dict(attacker.ends)


async def _again_and_again(
    attacker: Attacker, call: Callable[[Attacker, int], Awaitable[None]], numbers: count[int]
) -> None:
    while True:
        try:
            await call(attacker, next(numbers))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            attacker.ends[type(error).__name__] += 1
            await asyncio.sleep(_PAUSE_S)


async def _end_of_input() -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


def _tell(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.flush()


def main() -> None:
    """Read the plan, attack until the input ends, print a JSON object of ends."""
    os.nice(_LOWEST)
    plan = msgspec.json.decode(sys.stdin.readline(), type=AttackPlan)

    async def attacking() -> dict[str, int]:
        _tell(b"")  # it begins
        return await attack(plan, _end_of_input())

    _tell(msgspec.json.encode(asyncio.run(attacking())))


if __name__ == "__main__":
    main()
