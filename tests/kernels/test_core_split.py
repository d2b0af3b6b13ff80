"""Kernel calls on cores that another process uses too: who gets how many, and the same bits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pdserve import _native
from tests.kernels.cases import Shape, make_case
from tests.kernels.test_attention import attend

CASE = make_case(Shape(), [(40, 30), (1, 100), (64, 0)])
FOREVER_S = 1e5


@pytest.fixture
def memory() -> Iterator[int]:
    """Descriptor of what both processes have mapped; the threads are as before afterwards."""
    before = _native.num_threads()
    fd = os.memfd_create("cores")
    os.ftruncate(fd, _native.CORE_SPLIT_BYTES)
    yield fd
    os.close(fd)
    _native.set_core_split(None)
    _native.set_num_threads(before)


def both(fd: int, num_cores: int, lease_s: float = FOREVER_S) -> list[_native.CoreSplit]:
    """The sides of the one that asks, and of the one that takes the rest."""
    return [_native.CoreSplit(fd, takes_rest, num_cores, lease_s) for takes_rest in (False, True)]


def workers_ran_ns() -> dict[str, int]:
    """Worker |-> time that it has computed."""
    return {
        task.name: int((task / "schedstat").read_text().split()[0])
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text() == "pdserve-kernel\n"
    }


def num_working() -> int:
    """How many workers take part in jobs now, of those that are not on their way to sleep."""
    working = -1
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        before = workers_ran_ns()
        for _ in range(20):
            attend(CASE)
        after = workers_ran_ns()
        found = sum(after[worker] > before.get(worker, 0) for worker in after)
        if found == working:
            return found
        working = found
    raise AssertionError("never the same twice")


@pytest.mark.parametrize("num_cores", [2, 3, 5])
def test_each_has_its_part_and_alone_everything(memory: int, num_cores: int) -> None:
    asking, resting = both(memory, num_cores)
    assert [asking.allowed, resting.allowed] == [num_cores, num_cores]
    for asked in range(1, num_cores):
        asking.ask(asked)
        assert [asking.allowed, resting.allowed] == [num_cores, num_cores - asked]
        resting.ask(1)
        assert [asking.allowed, resting.allowed] == [asked, num_cores - asked]
        assert [asking.asked_by_other, resting.asked_by_other] == [1, asked]
        resting.release()
    asking.release()
    resting.ask(num_cores - 1)
    assert [asking.allowed, resting.allowed] == [1, num_cores]


def test_the_bits_are_the_same_on_any_number_of_cores(memory: int) -> None:
    expected = attend(CASE)
    _native.set_num_threads(4)
    asking, resting = both(memory, 4)
    resting.ask(1)
    _native.set_core_split(asking)
    for asked in (3, 1, 2, 3):
        asking.ask(asked)
        assert torch.equal(attend(CASE), expected)
        assert asking.mean_cores == asked
    resting.release()
    asking.ask(1)
    assert torch.equal(attend(CASE), expected)
    assert asking.mean_cores == 4


def test_only_the_threads_that_are_allowed_compute(memory: int) -> None:
    _native.set_num_threads(4)
    asking, resting = both(memory, 4)
    _native.set_core_split(resting)
    resting.ask(1)
    attend(CASE)
    assert len(workers_ran_ns()) == 3
    asking.ask(3)
    assert num_working() == 0
    asking.release()
    deadline_s = time.monotonic() + 20  # what they do in so short jobs is a matter of luck
    while num_working() == 0:
        assert time.monotonic() < deadline_s


def test_a_worker_leaves_a_job_that_goes_on(memory: int) -> None:
    """One job, of many items: a core is given back long before its end."""
    _native.set_num_threads(2)
    asking, resting = both(memory, 2)
    _native.set_core_split(resting)
    case = make_case(Shape(), [(8000, 0)])
    deadline_s = time.monotonic() + 60
    has_left = False
    while not has_left:  # the job may be over before anybody looks
        assert time.monotonic() < deadline_s
        asking.release()
        resting.ask(1)
        before = workers_ran_ns()
        job = threading.Thread(target=attend, args=(case,))
        job.start()
        while job.is_alive() and workers_ran_ns() == before:
            os.sched_yield()
        asking.ask(1)
        while job.is_alive() and not has_left:
            seen = workers_ran_ns()
            threading.Event().wait(0.02)
            has_left = workers_ran_ns() == seen and job.is_alive()
        job.join()


def test_cores_change_hands_while_jobs_run(memory: int) -> None:
    expected = attend(CASE)
    _native.set_num_threads(3)
    asking, resting = both(memory, 3)
    _native.set_core_split(resting)
    resting.ask(1)
    is_over, wrong = threading.Event(), []

    def compute() -> None:
        while not is_over.is_set():
            if not torch.equal(attend(CASE), expected):
                wrong.append(1)

    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(300):
        asking.ask(1 + number % 2)
        os.sched_yield()
        asking.release()
    for number in range(10):  # nor do resizes, nor a split that comes and goes
        _native.set_num_threads(1 + number % 3)
        _native.set_core_split(None if number % 2 else resting)
    is_over.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_is_asked_for_expires_unless_jobs_go_on(memory: int) -> None:
    lease_s = 0.2
    asking, resting = both(memory, 2, lease_s)
    asking.ask(1)
    deadline_s = time.monotonic() + 20
    while resting.asked_by_other:  # it stands still
        assert time.monotonic() < deadline_s
        threading.Event().wait(lease_s / 4)
    assert resting.allowed == 2
    _native.set_num_threads(2)
    _native.set_core_split(asking)
    while not resting.asked_by_other:  # but for a pause of this process
        assert time.monotonic() < deadline_s
        attend(CASE)


def test_who_has_ended_asks_for_nothing(memory: int) -> None:
    asking, resting = both(memory, 2)
    asking.ask(1)
    assert resting.allowed == 1
    resting.clear_other()
    assert [resting.allowed, resting.asked_by_other] == [2, 0]


def test_garbage_costs_time_and_no_more(memory: int) -> None:
    expected = attend(CASE)
    _native.set_num_threads(3)
    asking, resting = both(memory, 3)
    for word in (b"\xff" * 8, b"\xff\xff" + b"\0" * 6, b"\x01" * 8, os.urandom(8)):
        for split, offset in ((resting, 0), (asking, 64)):
            os.pwrite(memory, word, offset)
            _native.set_core_split(split)
            split.ask(1)
            assert 1 <= split.allowed <= 3
            assert torch.equal(attend(CASE), expected)
            split.release()


def test_a_split_refuses_what_it_cannot_be(memory: int) -> None:
    for num_cores in (1, 0, 1025):
        with pytest.raises(ValueError, match=f"num_cores: expected 2 to 1024, found {num_cores}"):
            _native.CoreSplit(memory, True, num_cores, 1.0)
    for lease_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="lease_s: expected a time above 0"):
            _native.CoreSplit(memory, True, 2, lease_s)
    with pytest.raises(OSError, match="Bad file descriptor"):
        _native.CoreSplit(-1, True, 2, 1.0)
    asking, _ = both(memory, 3)
    for asked in (0, 3):
        with pytest.raises(ValueError, match=f"num_cores: expected 1 to 2, found {asked}"):
            asking.ask(asked)
