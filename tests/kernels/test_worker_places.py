"""Where the workers of a kernel call run while another process uses the cores too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pdserve import _native
from pdserve.engine.plan.forms import FLOAT32
from tests.kernels.cases import Shape, make_case
from tests.kernels.test_attention import attend
from tests.unit.engine_model.small_models import all_logits, random_tokens, small_model

CORES = sorted(os.sched_getaffinity(0))[:2]
BURN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print('on', flush=True)\n"
BURN += "end = __import__('time').monotonic() + 60\n"  # should the test be killed
BURN += "while __import__('time').monotonic() < end: pass"

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="there is no core to go to")


@pytest.fixture(autouse=True)
def cores() -> Iterator[None]:
    """Two threads on two cores, and afterwards all as it was."""
    threads, usable = _native.num_threads(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, CORES)
    _native.set_num_threads(1)  # so that the next worker starts with these cores
    _native.set_num_threads(2)
    yield
    os.sched_setaffinity(0, usable)
    _native.set_num_threads(1)
    _native.set_num_threads(threads)


@contextmanager
def neighbour(core: int) -> Iterator[None]:
    """Another process that is always busy on this core."""
    command = [sys.executable, "-S", "-c", BURN, str(core)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"on\n"
            yield
        finally:
            process.kill()


def worker() -> int:
    """Id of the only worker thread, once it sleeps: it decides nothing about its place then."""
    (found,) = [
        thread
        for thread in Path("/proc/self/task").iterdir()
        if (thread / "comm").read_text() == "pdserve-kernel\n"
    ]
    deadline_s = time.monotonic() + 10
    while (found / "stat").read_text().rpartition(")")[2].split()[0] != "S":
        assert time.monotonic() < deadline_s
        os.sched_yield()
    return int(found.name)


def said_anew(thread: int) -> int:
    """Restrict a thread to one core, but not to the one to which it may have gone by itself."""
    core = CORES[1] if os.sched_getaffinity(thread) == {CORES[0]} else CORES[0]
    os.sched_setaffinity(thread, {core})
    return core


def test_a_worker_leaves_the_core_of_its_caller() -> None:
    model = small_model(torch.float32)
    decoder = model.native(FLOAT32)

    def step() -> None:  # during which a worker looks for work, however late it wakes up
        all_logits(decoder, model.kv_cache(), random_tokens(40, 1))

    step()
    caller_core, other_core = CORES
    os.sched_setaffinity(0, {caller_core})
    with neighbour(other_core):  # so that Linux seldom sees a better place for it by itself
        for _ in range(100):
            os.sched_setaffinity(worker(), {caller_core})
            step()
            os.sched_setaffinity(worker(), CORES)
            step()
            if os.sched_getaffinity(worker()) == {other_core}:
                break
        assert os.sched_getaffinity(worker()) == {other_core}


def test_a_worker_may_stay_if_it_has_only_the_callers_core() -> None:
    case = make_case(Shape(), [(40, 30), (1, 100)])
    expected = attend(case)
    core = said_anew(worker())
    os.sched_setaffinity(0, {core})
    assert all(torch.equal(attend(case), expected) for _ in range(50))
    assert os.sched_getaffinity(worker()) == {core}


def test_neighbours_on_all_cores_change_no_result() -> None:
    case = make_case(Shape(), [(40, 30), (1, 100)])
    expected = attend(case)
    with neighbour(CORES[0]), neighbour(CORES[1]):
        assert all(torch.equal(attend(case), expected) for _ in range(300))
    assert os.sched_getaffinity(worker()) <= set(CORES)


def test_a_worker_minds_who_else_says_where_it_may_run() -> None:
    case = make_case(Shape(), [(40, 30), (1, 100)])
    attend(case)
    for core in CORES:  # the worker steps away from each, if it ever steps away
        os.sched_setaffinity(0, {core})
        for _ in range(20):
            attend(case)
    os.sched_setaffinity(0, CORES)
    core = said_anew(worker())
    with neighbour(core):  # so that the caller waits for it, and would lend its core
        for _ in range(300):
            attend(case)
    assert os.sched_getaffinity(worker()) == {core}
