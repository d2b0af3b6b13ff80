"""Which cores a node's threads are given, and that they stay there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.node.start.cores import CorePlan, plan_cores, use_service_cores
from pdserve.settings.config import EngineConfig
from pdserve.settings.values import format_cpus
from pdserve.shared.errors import ConfigError


@pytest.mark.parametrize(
    ("cpus", "threads", "expected"),
    [
        ("", 0, CorePlan(4, (0, 1, 2, 3), (0, 1, 2, 3))),
        ("1", 0, CorePlan(1, (1,), (1,))),
        ("2-3,0", 2, CorePlan(2, (0, 2), (3,))),
        ("0-3", 3, CorePlan(3, (0, 1, 2), (3,))),
        ("1-2", 5, CorePlan(5, (1, 2), (1, 2))),
    ],
)
def test_compute_threads_come_first_and_services_get_the_rest(
    cpus: str, threads: int, expected: CorePlan
) -> None:
    assert plan_cores(EngineConfig(cpus=cpus, threads=threads), range(4)) == expected


def test_of_many_cores_one_is_kept_for_services() -> None:
    plan = plan_cores(EngineConfig(), range(8))
    assert plan == CorePlan(7, tuple(range(7)), (7,))
    assert plan_cores(EngineConfig(threads=8), range(8)).service == tuple(range(8))


@given(st.sets(st.integers(0, 127), min_size=1), st.integers(0, 200))
def test_every_core_is_used_and_services_avoid_compute_if_they_can(
    cores: set[int], threads: int
) -> None:
    plan = plan_cores(EngineConfig(cpus=format_cpus(sorted(cores)), threads=threads), sorted(cores))
    assert set(plan.compute) | set(plan.service) == cores
    assert len(plan.compute) == min(plan.num_threads, len(cores))
    assert plan.service == plan.compute or not set(plan.service) & set(plan.compute)


def test_a_core_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="may use 0-1"):
        plan_cores(EngineConfig(cpus="1-2"), [0, 1])


def test_what_is_not_possible_is_said_with_numbers() -> None:
    assert "3 threads, 1 cores" in plan_cores(EngineConfig(cpus="1", threads=3), [0, 1]).describe()
    text = plan_cores(EngineConfig(threads=1), [0, 1]).describe()
    assert text == "1 compute threads on cores 0, services on 1"


def test_threads_that_end_while_they_are_moved_are_no_obstacle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved: list[int] = []

    def move(thread: int, cores: tuple[int, ...]) -> None:
        if thread == 1:
            raise ProcessLookupError
        moved.append(thread)

    monkeypatch.setattr(os, "listdir", lambda path: ["1", "2"])
    monkeypatch.setattr(os, "sched_setaffinity", move)
    use_service_cores(CorePlan(1, (0,), (0,)))
    assert moved == [2]


_THREADS_OF_A_NODE = """
import json, os, threading, torch
from pathlib import Path
from pdserve import _native
from pdserve.settings.config import EngineConfig
from pdserve.node.start.cores import CorePlan, use_compute_cores, use_service_cores
from pdserve.node.start.model import set_threads

first, second = sorted(os.sched_getaffinity(0))[:2]
plan = CorePlan(2, (first,), (second,))
early = threading.Event()
threading.Thread(target=early.wait, daemon=True).start()  # as libraries have, when they are loaded
set_threads(plan.num_threads)
use_service_cores(plan)

before = set(os.listdir("/proc/self/task"))

def compute():
    use_compute_cores(plan)
    from pdserve.engine.plan.forms import FLOAT32
    from pdserve.engine.native.linear import linear, pack
    packed = pack(torch.ones(512, 64), form=FLOAT32)
    linear(torch.ones(512, 64), packed, torch.empty(512, 512))
    allowed = {"plan": {first, second}}
    for task in Path("/proc/self/task").iterdir():  # while this thread is one of them
        name = (task / "comm").read_text().strip()
        if name != "pdserve-kernel":
            name = "others" if task.name in before else "engine"  # or a worker of torch
        allowed.setdefault(name, set()).update(os.sched_getaffinity(int(task.name)))
    print(json.dumps({name: sorted(cores) for name, cores in allowed.items()}))

engine = threading.Thread(target=compute)
engine.start()
engine.join()
"""


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_workers_stay_where_the_engines_thread_is_and_all_others_elsewhere() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _THREADS_OF_A_NODE], capture_output=True, text=True, check=True
    )
    allowed = json.loads(run.stdout)
    compute, service = allowed.pop("plan")
    assert allowed.pop("others") == [service]
    assert allowed.pop("pdserve-kernel") == [compute]
    assert allowed == {"engine": [compute]}
