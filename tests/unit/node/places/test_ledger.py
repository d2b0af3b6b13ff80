"""What the places of a node share: memory that never is too much, and turns that always go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve import _native
from pdserve._native import Ledger

SOON_S = 30.0  # on a machine that is busy with other things


@pytest.fixture
def path() -> Iterator[str]:
    fd = os.memfd_create("ledger", os.MFD_CLOEXEC)
    yield f"/proc/{os.getpid()}/fd/{fd}"
    os.close(fd)


def until_waiting(holder: Ledger, number: int) -> None:
    end_s = time.monotonic() + SOON_S
    while holder.num_waiting != number:
        assert time.monotonic() < end_s
        time.sleep(0.002)


def started(path: str, place: int, does: str) -> subprocess.Popen[str]:
    """Another process that is this place, does something, says so, and stays.

    It loads nothing but the extension, and so starts in no time.
    """
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_native", {_native.__file__!r})
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
ledger = native.Ledger({path!r}, {place}, 1000)
{does}
print("done", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-S", "-c", program]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def other(path: str, place: int, does: str) -> Iterator[subprocess.Popen[str]]:
    """The same, when it has done it; it is killed at the end."""
    process = started(path, place, does)
    with ending(process):
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        yield process


# ---- memory --------------------------------------------------------------------------------------


def test_weights_count_while_awake_and_a_floor_is_nobody_elses(path: str) -> None:
    one, two = Ledger(path, 0, 1000), Ledger(path, 1, 1000)
    assert one.enter(weights=200, floor=100)
    assert one.take(800), "alone, all that weights leave"
    assert not two.enter(weights=100, floor=50)
    one.give(300)
    assert two.enter(weights=100, floor=50)
    assert two.room == one.room + 50 == 200
    assert not one.take(151)
    assert one.take(150)
    assert (one.room, two.room) == (0, 50)
    assert two.take(50), "its floor"
    one.leave()
    assert two.room == 1000 - 100 - 50
    assert not one.enter(weights=700, floor=200), "too much beside the other"


def test_what_one_lacks_another_owes_but_never_of_its_floor(path: str) -> None:
    one, two = Ledger(path, 0, 1000), Ledger(path, 1, 1000)
    assert one.enter(0, 400)
    assert two.enter(0, 100)
    assert one.take(900)
    assert two.take(100)
    one.set_used(500)
    assert (one.owed, two.reach) == (0, 400)
    two.set_wanted(300)
    assert one.owed == 300
    one.give(200)
    assert one.owed == 100
    two.set_wanted(900)
    assert one.owed == 300, "700 are held, of which 400 are its floor"


def test_above_an_equal_share_nobody_takes_what_another_lacks(path: str) -> None:
    one, two = Ledger(path, 0, 1000), Ledger(path, 1, 1000)
    assert one.enter(0, 10)
    assert two.enter(0, 10)
    assert one.take(700)
    two.set_wanted(600)
    assert (one.room, two.room) == (0, 300)
    two.set_wanted(0)
    assert one.room == 290, "but for the other's floor"


def test_a_place_is_one_process(path: str) -> None:
    ledger = Ledger(path, 3, 1000)
    with pytest.raises(BlockingIOError):
        Ledger(path, 3, 1000)
    del ledger
    with pytest.raises(ValueError, match="place: expected 0 to 15"):
        Ledger(path, 16, 1000)
    with pytest.raises(FileNotFoundError):
        Ledger("/nowhere/ledger", 0, 1000)


def test_places_have_one_budget_which_changes_while_none_is_there(path: str) -> None:
    first = Ledger(path, 0, 1000)
    second = Ledger(path, 1, 1000)
    for _ in range(2):
        with pytest.raises(ValueError, match="share 1000 bytes, not 500: stop all of them"):
            Ledger(path, 2, 500)
    del first
    assert Ledger(path, 2, 1000).budget == 1000
    del second
    with other(path, 0, "assert ledger.enter(300, 100) and ledger.take(400)"):
        pass
    again = Ledger(path, 1, 500)
    assert again.budget == 500, "the file outlives its places"
    assert again.clear_dead()
    assert again.enter(400, 100)


def test_what_a_killed_place_had_comes_back(path: str) -> None:
    here = Ledger(path, 0, 1000)
    assert here.enter(100, 100)
    with other(path, 1, "assert ledger.enter(300, 100) and ledger.take(400)") as process:
        assert here.room == 200
        assert not here.clear_dead()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert here.clear_dead()
        assert here.room == 900
    again = Ledger(path, 1, 1000)
    assert again.enter(300, 100)


def test_processes_that_take_at_the_same_time_never_have_too_much(
    path: str, tmp_path: Path
) -> None:
    """Of 1000, two cannot have 600: whoever has them makes a file that nobody else has made."""
    does = f"""
import os, time
assert ledger.enter(0, 1)
num_taken, end_s = 0, time.monotonic() + 30
while num_taken < 300 and time.monotonic() < end_s:
    if ledger.take(600):
        os.close(os.open({str(tmp_path / "taken")!r}, os.O_CREAT | os.O_EXCL))
        os.unlink({str(tmp_path / "taken")!r})
        ledger.give(600)
        num_taken += 1
assert num_taken == 300
"""
    programs = [started(path, place, does) for place in (1, 2, 3)]
    for process in programs:
        with ending(process):
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"


# ---- turns ---------------------------------------------------------------------------------------


def test_the_turn_goes_to_whose_step_is_due_first(path: str) -> None:
    holder, *others = (Ledger(path, place, 1000) for place in range(4))
    assert holder.try_turn(60.0)
    order: list[int] = []

    def wait(number: int, ledger: Ledger, due_s: float) -> None:
        assert ledger.await_turn(due_s, 60.0, SOON_S)
        order.append(number)
        ledger.pass_turn(has_more=False)

    waiting = []
    for number, (ledger, due_s) in enumerate(zip(others, (30.0, 10.0, 20.0), strict=True)):
        waiting.append(threading.Thread(target=wait, args=(number, ledger, due_s)))
        waiting[-1].start()
        until_waiting(holder, number + 1)
    assert holder.pass_turn(has_more=True, due_s=5.0, lease_s=60.0), "its own is due before theirs"
    assert not holder.pass_turn(has_more=True, due_s=15.0, lease_s=60.0)
    for thread in waiting:
        thread.join(SOON_S)
    assert order == [1, 2, 0]
    assert holder.try_turn(1.0), "nobody has it"


def test_a_wait_for_a_turn_ends(path: str) -> None:
    holder, waiter = Ledger(path, 0, 1000), Ledger(path, 1, 1000)
    assert holder.try_turn(60.0)
    assert not waiter.await_turn(1.0, 1.0, 0.01)
    assert holder.num_waiting == 0
    assert not holder.pass_turn(has_more=False)
    assert waiter.await_turn(1.0, 1.0, 0.0)


def test_the_turn_of_a_killed_place_goes_on(path: str) -> None:
    here = Ledger(path, 0, 1000)
    with other(path, 1, "assert ledger.try_turn(3600.0)") as process:
        assert not here.await_turn(1.0, 1.0, 0.05)
        process.send_signal(signal.SIGKILL)
        assert here.await_turn(1.0, 1.0, SOON_S)


def test_a_frozen_place_loses_its_turn_when_its_lease_is_over(path: str) -> None:
    here = Ledger(path, 0, 1000)
    with other(path, 1, "assert ledger.try_turn(0.2)") as process:
        process.send_signal(signal.SIGSTOP)
        assert here.await_turn(1.0, 60.0, SOON_S)
        process.send_signal(signal.SIGCONT)
    assert here.num_waiting == 0


def test_a_lone_place_pays_microseconds(path: str) -> None:
    """Fastest of many, so that a busy machine does not matter."""
    ledger = Ledger(path, 0, 1000)
    best_s = min(_turn_s(ledger) for _ in range(200))
    assert best_s < 20e-6


def _turn_s(ledger: Ledger) -> float:
    began_s = time.perf_counter()
    assert ledger.try_turn(1.0)
    assert ledger.num_waiting == 0
    return time.perf_counter() - began_s
