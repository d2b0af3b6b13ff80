"""copy_spans.cu: compiled for a GPU by nvcc, and run on the CPU, thread after thread.

The threads of this kernel share nothing and wait for nothing, so one after the other is as good as
all at once.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.spans.pieces import PIECE_BYTES, cut_pieces

KERNEL = Path(str(resources.files("kv_transfer.cuda").joinpath("copy_spans.cu")))

ON_A_CPU = """
struct Index { unsigned x; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static Index threadIdx, blockIdx, blockDim, gridDim;
#define __global__
#define __device__
#include "copy_spans.cu"
extern "C" void run(unsigned char* to, const unsigned char* from, const long long* pieces,
                    int num_pieces, unsigned blocks, unsigned threads) {
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            copy_spans(to, from, pieces, num_pieces);
}
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_it_compiles_for_an_h100(tmp_path: Path) -> None:
    out = tmp_path / "copy_spans.cubin"
    command = ["nvcc", "-std=c++17", "-arch=sm_90", "-cubin", "-Werror", "all-warnings"]
    done = subprocess.run(
        [*command, str(KERNEL), "-o", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"copy_spans" in out.read_bytes()


@pytest.fixture(scope="module")
def on_a_cpu(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "on_a_cpu.cpp").write_text(ON_A_CPU)
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    command += ["-fsanitize=undefined", "-fno-sanitize-recover", f"-I{KERNEL.parent}"]
    subprocess.run(
        [*command, "on_a_cpu.cpp", "-o", "on_a_cpu.so"], cwd=folder, check=True, timeout=100
    )
    return ctypes.CDLL(str(folder / "on_a_cpu.so"))


@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (3, 256)])
def test_it_copies_pieces_of_any_size_and_alignment(
    on_a_cpu: ctypes.CDLL, blocks: int, threads: int
) -> None:
    rng = np.random.default_rng(7)
    source = rng.integers(0, 256, 1 << 20, np.uint8)
    sizes = [0, 1, 15, 16, 17, 255, 256, 2048, 2047, 4096 + 8, PIECE_BYTES, 5 * PIECE_BYTES + 3]
    rows, at = [], 0
    for size in sizes:
        for from_shift, to_shift in [(0, 0), (16, 0), (1, 0), (0, 1), (8, 8), (3, 3)]:
            rows.append((int(rng.integers(0, 1000)) * 16 + from_shift, at + to_shift, size))
            at += -(-size // 16) * 16 + 32
    spans = np.array(rows, dtype=np.int64)
    expected = np.zeros(at, np.uint8)
    for a, b, n in rows:
        expected[b : b + n] = source[a : a + n]
    copied = np.zeros(at + 16, np.uint8)
    copied = copied[-copied.ctypes.data % 16 :][:at]
    pieces = np.ascontiguousarray(cut_pieces(spans))
    on_a_cpu.run(
        ctypes.c_void_p(copied.ctypes.data),
        ctypes.c_void_p(source.ctypes.data),
        ctypes.c_void_p(pieces.ctypes.data),
        len(pieces),
        blocks,
        threads,
    )
    np.testing.assert_array_equal(copied, expected)
