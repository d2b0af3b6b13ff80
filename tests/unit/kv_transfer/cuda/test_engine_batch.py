"""The call of CUDA's batched copies: into a driver that copies on the CPU, of CUDA's own header.

So whatever differs from the header in number, type or order of the arguments shows.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.cuda.driver import DeviceError
from kv_transfer.cuda.engine_batch import EngineBatch, engine_batch

STREAM = (1 << 40) + 8  # needs all 64 bits of a pointer

DRIVER = """
#include <cuda.h>
#include <cstring>

int num_calls = 0;

CUresult CUDAAPI cuMemcpyBatchAsync(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes,
                                    size_t count, CUmemcpyAttributes* attrs, size_t* attrsIdxs,
                                    size_t numAttrs, CUstream hStream) {
    ++num_calls;
    if (numAttrs != 1 || attrsIdxs[0] != 0) return CUDA_ERROR_INVALID_VALUE;
    if (attrs[0].srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) return CUDA_ERROR_UNKNOWN;
    if (attrs[0].flags != CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE) return CUDA_ERROR_UNKNOWN;
    if (hStream != reinterpret_cast<CUstream>((1ull << 40) + 8)) return CUDA_ERROR_INVALID_HANDLE;
    for (size_t i = 0; i < count; ++i) {
        if (sizes[i] == 0) return CUDA_ERROR_INVALID_VALUE;
        std::memcpy(reinterpret_cast<void*>(dsts[i]), reinterpret_cast<void*>(srcs[i]), sizes[i]);
    }
    return CUDA_SUCCESS;
}

extern "C" int calls() { return num_calls; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    header = Path(str(resources.files("triton").joinpath("backends/nvidia/include/cuda.h")))
    if not header.exists():
        pytest.skip("needs CUDA's header, which Triton brings")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(DRIVER)
    command = [compiler, "-std=c++17", "-shared", "-fPIC", f"-I{header.parent}"]
    subprocess.run([*command, "driver.cpp", "-o", "driver.so"], cwd=folder, check=True, timeout=100)
    return str(folder / "driver.so")


@pytest.fixture
def batch(library: str) -> EngineBatch:
    opened = engine_batch(library)
    assert opened is not None
    return opened


def test_all_copies_are_one_call(batch: EngineBatch, library: str) -> None:
    calls = ctypes.CDLL(library).calls
    before = calls()
    source = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)
    copied = np.zeros(100_000, np.uint8)
    spans = np.array([(0, 90_000, 5), (70_001, 3, 4000), (9, 20_000, 60_000)], np.int64)
    batch.queue(copied.ctypes.data, source.ctypes.data, spans, STREAM)
    expected = np.zeros(100_000, np.uint8)
    for a, b, n in spans.tolist():
        expected[b : b + n] = source[a : a + n]
    np.testing.assert_array_equal(copied, expected)
    assert calls() - before == 1


def test_an_error_of_cuda_is_one(batch: EngineBatch) -> None:
    memory = np.zeros(64, np.uint8)
    spans = np.array([(0, 32, 16)], np.int64)
    with pytest.raises(DeviceError, match="of 1 copies returned CUDA's error 400"):
        batch.queue(memory.ctypes.data, memory.ctypes.data, spans, 0)


def test_a_driver_without_it_has_none() -> None:
    assert engine_batch("libc.so.6") is None
    assert engine_batch("libcuda-that-is-nowhere.so.1") is None
