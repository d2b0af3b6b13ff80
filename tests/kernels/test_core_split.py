"""Kernel calls of two threads at a time: who gets how many cores, and the same bits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from pdserve import _native
from tests.kernels.cases import Shape, make_case
from tests.kernels.test_attention import attend

CASE = make_case(Shape(), [(40, 30), (1, 100), (64, 0)])


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """A thread that goes on, with whatever workers it has got."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


def workers_ran_ns() -> dict[str, int]:
    """Worker |-> time that it has computed."""
    ran_ns = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if (task / "comm").read_text() == "pdserve-kernel\n":
                ran_ns[task.name] = int((task / "schedstat").read_text().split()[0])
    return ran_ns


def num_working(thread: ThreadPoolExecutor) -> int:
    """How many workers take part in jobs of the thread, those on their way to sleep left out."""
    working = -1
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        before = workers_ran_ns()
        for _ in range(20):
            thread.submit(attend, CASE).result()
        after = workers_ran_ns()
        found = sum(after[worker] > before.get(worker, 0) for worker in after)
        if found == working:
            return found
        working = found
    raise AssertionError("never the same twice")


@pytest.mark.parametrize("num_cores", [2, 3, 5])
def test_each_has_its_part_and_alone_everything(num_cores: int) -> None:
    asking, resting = _native.split_cores(num_cores)
    assert [asking.num_cores, resting.num_cores] == [num_cores, num_cores]
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


def test_the_bits_are_the_same_on_any_number_of_cores(thread: ThreadPoolExecutor) -> None:
    expected = attend(CASE)
    asking, resting = _native.split_cores(4)
    resting.ask(1)
    thread.submit(_native.use_core_share, asking).result()
    for asked in (3, 1, 2, 3):
        asking.ask(asked)
        assert torch.equal(thread.submit(attend, CASE).result(), expected)
        assert asking.mean_cores == asked
    resting.release()
    asking.ask(1)
    assert torch.equal(thread.submit(attend, CASE).result(), expected)
    assert asking.mean_cores == 4


def test_only_the_threads_that_are_allowed_compute(thread: ThreadPoolExecutor) -> None:
    asking, resting = _native.split_cores(4)
    thread.submit(_native.use_core_share, resting).result()
    assert thread.submit(_native.num_threads).result() == 4
    resting.ask(1)
    asking.ask(3)
    before = set(workers_ran_ns())
    thread.submit(attend, CASE).result()
    assert len(set(workers_ran_ns()) - before) == 3
    assert num_working(thread) == 0
    asking.release()
    deadline_s = time.monotonic() + 20  # what they do in so short jobs is a matter of luck
    while num_working(thread) == 0:
        assert time.monotonic() < deadline_s


def test_workers_end_with_their_thread_or_when_it_has_no_share_any_more() -> None:
    asking, _ = _native.split_cores(3)

    def compute(share: _native.CoreShare | None) -> None:
        _native.use_core_share(share)
        attend(CASE)

    def wait_for(num_own: int) -> None:
        deadline_s = time.monotonic() + 20  # the system lists them a little longer
        while len(set(workers_ran_ns()) - before) != num_own:
            assert time.monotonic() < deadline_s

    attend(CASE)  # with the process's workers
    before = set(workers_ran_ns())
    with ThreadPoolExecutor(1) as thread:
        for share in (asking, None, asking):
            thread.submit(compute, share).result()
            wait_for(0 if share is None else 2)
    wait_for(0)


def test_a_worker_leaves_a_job_that_goes_on(thread: ThreadPoolExecutor) -> None:
    """One job, of many items: a core is given back long before its end."""
    asking, resting = _native.split_cores(2)
    thread.submit(_native.use_core_share, resting).result()
    case = make_case(Shape(), [(8000, 0)])
    deadline_s = time.monotonic() + 60
    has_left = False
    while not has_left:  # the job may be over before anybody looks
        assert time.monotonic() < deadline_s
        asking.release()
        resting.ask(1)
        before = workers_ran_ns()
        job = thread.submit(attend, case)
        while not job.done() and workers_ran_ns() == before:
            os.sched_yield()
        asking.ask(1)
        while not job.done() and not has_left:
            seen = workers_ran_ns()
            threading.Event().wait(0.02)
            has_left = workers_ran_ns() == seen and not job.done()
        job.result()


def test_cores_change_hands_while_both_compute() -> None:
    expected = attend(CASE)
    shares = _native.split_cores(3)
    is_over = threading.Event()

    def compute(share: _native.CoreShare) -> bool:
        _native.use_core_share(share)
        same = True
        while not is_over.is_set():
            same = same and torch.equal(attend(CASE), expected)
        return same

    with ThreadPoolExecutor(2) as both:
        computing = [both.submit(compute, share) for share in shares]
        for number in range(300):
            shares[number % 2].ask(1 + number // 2 % 2)
            os.sched_yield()
            if number % 5 == 0:
                shares[number // 5 % 2].release()
        is_over.set()
        assert [one.result() for one in computing] == [True, True]


def test_what_cannot_be_split_is_refused() -> None:
    for num_cores in (1, 0, 1025):
        with pytest.raises(ValueError, match=f"num_cores: expected 2 to 1024, found {num_cores}"):
            _native.split_cores(num_cores)
    asking, _ = _native.split_cores(3)
    for asked in (0, 3):
        with pytest.raises(ValueError, match=f"num_cores: expected 1 to 2, found {asked}"):
            asking.ask(asked)
