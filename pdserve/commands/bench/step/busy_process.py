"""A process that wants one core half of the time, while it is told to: a neighbour of a benchmark.

`python -m THIS_MODULE CORE`. It repeats each order that it reads, once it
minds it, and ends when there is nobody left to give any.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time

BUSY, REST = b"b", b"r"
_LEAST_S, _MOST_S = 0.005, 0.015  # of a burst; then it rests for as long


def _burn(seconds: float) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def _main(core: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started it, who then ends it
    os.sched_setaffinity(0, {core})
    draw = random.Random(core)
    is_busy, burst_s = False, 0.0
    orders, answers = sys.stdin.fileno(), sys.stdout.fileno()
    while True:
        if select.select([orders], [], [], burst_s if is_busy else None)[0]:
            order = os.read(orders, 1)
            if not order:
                return
            is_busy = order == BUSY
            os.write(answers, order)
        if is_busy:
            burst_s = draw.uniform(_LEAST_S, _MOST_S)
            _burn(burst_s)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
