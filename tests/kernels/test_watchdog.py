"""A thread that stands still with work to do is found, whoever has the interpreter."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdserve._native import StillTime, Watchdog
from pdserve.shared.process.exit_codes import SICK
from tests.waits import WITHIN_S

TICK_S = 0.01
NEVER_S = 1e9

# A process whose thread begins to stand still, with the interpreter's lock or without.
STANDING = """
import ctypes, faulthandler, signal, threading, time
from pdserve._native import Watchdog

def stands():
    started.wait()
    {how}

started = threading.Event()
thread = threading.Thread(target=stands, daemon=True)
thread.start()
dog = Watchdog(thread.native_id, time.pthread_getcpuclockid(thread.ident))
faulthandler.register(signal.SIGRTMIN)
dog.start(0.01, 0.1, {code}, signal.SIGRTMIN)
dog.expect()
started.set()
threading.Event().wait({within})
"""


class Worker:
    """A thread that does one thing after the other: whatever it is told."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.computes = False
        self.is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._thread.ident is not None
        assert self._thread.native_id is not None
        clock = time.pthread_getcpuclockid(self._thread.ident)
        self.dog = Watchdog(self._thread.native_id, clock)

    def _run(self) -> None:
        while not self.is_over:
            if not self.computes:
                self.may_go.wait()

    def end(self) -> None:
        self.dog.stop()
        self.is_over = True
        self.may_go.set()
        self._thread.join()

    def still_for(self, seconds: float) -> None:
        """Wait until it has stood still for so long."""
        deadline_s = time.monotonic() + WITHIN_S
        while self.dog.still_s < seconds:
            assert time.monotonic() < deadline_s
            time.sleep(TICK_S)


@contextmanager
def worker() -> Iterator[Worker]:
    made = Worker()
    try:
        made.dog.start(TICK_S, NEVER_S, SICK, 0)
        yield made
    finally:
        made.end()


def test_only_who_has_something_to_do_stands_still() -> None:
    with worker() as made:
        made.dog.expect()
        made.still_for(5 * TICK_S)
        made.dog.expect()
        made.dog.done()  # it goes on, with the next thing
        made.still_for(5 * TICK_S)
        made.dog.done()
        deadline_s = time.monotonic() + WITHIN_S
        while made.dog.still_s:
            assert time.monotonic() < deadline_s
            time.sleep(TICK_S)


def test_who_computes_does_not_stand_still() -> None:
    with worker() as made:
        made.computes = True
        made.may_go.set()
        made.dog.expect()
        began_s = time.monotonic()
        while time.monotonic() < began_s + 20 * TICK_S:
            assert made.dog.still_s < 10 * TICK_S
            time.sleep(TICK_S)


@pytest.mark.parametrize("how", ["threading.Event().wait()", "ctypes.PyDLL(None).pause()"])
def test_the_process_ends_whoever_has_the_interpreter(how: str) -> None:
    """It says why, and where its threads were."""
    code = STANDING.format(how=how, code=SICK, within=WITHIN_S)
    words = [sys.executable, "-c", code]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert ended.returncode == SICK, ended.stderr
    assert "in stands" in ended.stderr
    *_, last = ended.stderr.splitlines()
    assert last.startswith("pdserve node: error: engine_stuck: its thread has not run for")


def looks(*seen: tuple[float, float, int, bool]) -> list[float]:
    still = StillTime(1.0)
    return [still.look(*each) for each in seen]


def test_ticks_that_come_late_are_not_counted() -> None:
    """The process was stopped, or the machine too busy; what was counted before counts on."""
    ran = (7.0, 3, False)
    assert looks((10, *ran), (11, *ran), (12, *ran), (60, *ran), (62.5, *ran), (63.5, *ran)) == [
        0.0, 1.0, 2.0, 2.0, 2.0, 3.0,
    ]  # fmt: skip


@pytest.mark.parametrize("seen", [(7.01, 3, False), (7.0, 4, False), (7.0, 3, True)])
def test_time_begins_anew_when_it_runs(seen: tuple[float, int, bool]) -> None:
    """Or has done something; or has nothing to do, or waits for a core."""
    ran = (7.0, 3, False)
    assert looks((10, *ran), (11, *ran), (12, *ran), (13, *seen))[-2:] == [2.0, 0.0]


def test_ticks_take_time() -> None:
    with pytest.raises(ValueError, match="tick_s must be > 0"):
        StillTime(0.0)
