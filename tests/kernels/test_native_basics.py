"""Threads, CPU features and generations of the native extension."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pdserve import _native
from tests.kernels.cases import Shape, make_case
from tests.kernels.test_attention import attend


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Restores the number of threads."""
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


@pytest.mark.usefixtures("num_threads")
def test_number_of_threads() -> None:
    for count in (3, 1, 2):
        _native.set_num_threads(count)
        assert _native.num_threads() == count
    for count in (0, -1, 1025):
        with pytest.raises(ValueError, match=f"num_threads: expected 1 to 1024, found {count}"):
            _native.set_num_threads(count)


@pytest.mark.usefixtures("num_threads")
def test_calls_from_several_threads_and_resizes_do_not_disturb_each_other() -> None:
    case = make_case(Shape(), [(40, 30), (1, 100)])
    expected = attend(case)
    wrong = []

    def work() -> None:
        for i in range(100):
            _native.set_num_threads(1 + i % 3)
            if not torch.equal(attend(case), expected):
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.usefixtures("num_threads")
def test_workers_sleep_when_idle_and_use_no_cpu() -> None:
    _native.set_num_threads(3)
    attend(make_case(Shape(), [(40, 30)]))
    event = threading.Event()
    before = _worker_ticks()
    event.wait(0.2)
    assert len(before) >= 2
    assert _worker_ticks() == before


def _worker_ticks() -> dict[str, list[str]]:
    """CPU time of each of our worker threads: id |-> [user, system] clock ticks."""
    ticks = {}
    for thread_id in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread_id}/stat") as stat:
            name, _, fields = stat.read().rpartition(")")
        if name.endswith("(pdserve-kernel"):
            ticks[thread_id] = fields.split()[11:13]
    return ticks


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    case = make_case(Shape(), [(40, 30), (1, 100)])
    expected = attend(case)
    child = os.fork()
    if child == 0:
        # No assertion may leave this branch: it would run the rest of the tests twice.
        os._exit(0 if torch.equal(attend(case), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_features_and_variants_agree() -> None:
    features = _native.cpu_features()
    variants = _native.kernel_variants()
    if platform.machine() == "aarch64":
        assert set(features) == {"neon_bf16", "neon_dot", "neon_i8mm"}
        assert variants == [
            *(name for name in ("neon_bf16", "neon_dot") if features[name]),
            "neon",
        ]
        return
    assert set(features) == {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16"}
    assert variants[-2:] == ["portable", "amx_emulated"]
    assert ("amx" in variants) == features["amx_bf16"]
    assert ("avx2" in variants) == features["avx2"]
    assert ("avx512" in variants) == features["avx512f"]
    assert ("avx512_bf16" in variants) == features["avx512_bf16"]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bump_counts_every_mention(dtype: torch.dtype) -> None:
    generations = np.array([2**64 - 1, 5, 0, 9], dtype=np.uint64)
    _native.bump_generations(generations, torch.tensor([0, 2, 2], dtype=dtype).numpy())
    assert generations.tolist() == [0, 5, 2, 9]
    _native.bump_generations(generations, torch.tensor([3]))
    assert generations.tolist() == [0, 5, 2, 10]
    _native.bump_generations(generations, torch.tensor([], dtype=dtype).numpy())


def test_bumps_from_threads_are_not_lost() -> None:
    generations = np.zeros(4, dtype=np.uint64)
    ids = np.arange(4).repeat(50)

    def work() -> None:
        for _ in range(20):
            _native.bump_generations(generations, ids)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert generations.tolist() == [4000] * 4


def test_bump_refuses() -> None:
    generations = np.zeros(4, dtype=np.uint64)
    with pytest.raises(ValueError, match=r"ids\[1\]: expected a block id below 4, found 4"):
        _native.bump_generations(generations, np.array([0, 4]))
    with pytest.raises(ValueError, match=r"ids\[0\]: .*found -1"):
        _native.bump_generations(generations, np.array([-1]))
    with pytest.raises(TypeError, match="ids: expected dtype int32 or int64, found float32"):
        _native.bump_generations(generations, torch.tensor([0.0]))
    with pytest.raises(TypeError, match="generations: expected dtype uint64, found int64"):
        _native.bump_generations(torch.zeros(4, dtype=torch.int64), np.array([0]))
    with pytest.raises(ValueError, match="generations: expected shape"):
        _native.bump_generations(generations.reshape(2, 2), np.array([0]))
    generations.flags.writeable = False
    with pytest.raises(TypeError, match="generations: expected a writable CPU tensor"):
        _native.bump_generations(generations, np.array([0]))
    assert generations.tolist() == [0] * 4
