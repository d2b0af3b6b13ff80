"""Weights come in huge pages, from a file whose pages are shared, or in memory of one's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pdserve import _native
from pdserve.engine.native import packed_pages
from pdserve.engine.native.linear import ALIGNMENT
from pdserve.engine.native.packed_cache import packed_arrays
from pdserve.engine.native.packed_pages import (
    HUGE_PAGE_BYTES,
    huge_share,
    map_pages,
    private_pages,
)

CONTENT = np.random.default_rng(0).integers(0, 256, 8 * HUGE_PAGE_BYTES, np.uint8)


@pytest.fixture
def fd(tmp_path: Path) -> int:
    """Of a file that is on the disk and not in memory."""
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield file.fileno()


def read_in_small_pages(fd: int) -> None:
    for start in range(0, len(CONTENT), 1 << 12):
        os.posix_fadvise(fd, start, 1 << 12, os.POSIX_FADV_WILLNEED)
        os.pread(fd, 1, start)


def test_the_file_is_mapped_as_it_is(fd: int) -> None:
    mapped = map_pages(fd)
    assert np.array_equal(mapped, CONTENT)
    assert not mapped.flags.writeable
    assert mapped.ctypes.data % HUGE_PAGE_BYTES == 0


def test_small_pages_are_exchanged_for_huge_ones(fd: int) -> None:
    if huge_share(map_pages(fd)) == 0:
        pytest.skip("this kernel or file system has no huge pages for files")
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    read_in_small_pages(fd)
    if huge_share(map_pages(fd)) > 0.5:
        pytest.skip("this kernel reads small pieces into huge pages, too")
    mapped = map_pages(fd, worth_it_bytes=0)
    assert huge_share(mapped) > 0.5
    assert np.array_equal(mapped, CONTENT)


def test_a_file_that_stays_in_small_pages_is_read_once(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file system knows no huge pages, every start would read all of it anew."""
    given_back: list[int] = []
    monkeypatch.setattr(packed_pages, "huge_share", lambda mapped: 0.0)
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, start, num_bytes, advice: given_back.append(num_bytes)
    )
    assert np.array_equal(map_pages(fd, worth_it_bytes=0), CONTENT)
    assert np.array_equal(map_pages(fd, worth_it_bytes=0), CONTENT)  # nor does a later life of it
    assert given_back == [packed_pages._TRIED_BYTES]


def test_a_kernel_that_cannot_read_in_is_helped(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(_native, "read_in", lambda region: False)
    monkeypatch.setattr(packed_pages, "read_ahead", asked.append)
    assert np.array_equal(map_pages(fd), CONTENT)
    assert asked == [fd]


def test_private_memory_is_aligned_empty_and_writable() -> None:
    memory = private_pages(3 * HUGE_PAGE_BYTES + 5)
    assert len(memory) == 3 * HUGE_PAGE_BYTES + 5
    assert memory.ctypes.data % HUGE_PAGE_BYTES == 0
    assert not memory.any()
    memory[:] = 7
    assert memory[-1] == 7


def test_reading_ahead_needs_no_torch() -> None:
    program = "import sys, pdserve.node.start.prefetch; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_arrays_that_are_kept_nowhere_share_huge_pages() -> None:
    sizes = (700_000, 0, 5, HUGE_PAGE_BYTES, 1, 3 * HUGE_PAGE_BYTES, 99)
    arrays = {
        f"{i}": torch.full((size, 3), i, dtype=(torch.uint8, torch.bfloat16)[i % 2])
        for i, size in enumerate(sizes)
    }
    made = packed_arrays(None, "name", "identity", lambda: iter(arrays.items()), lambda: None)
    assert all(torch.equal(made[name], array) for name, array in arrays.items())
    assert all(array.data_ptr() % ALIGNMENT == 0 for array in made.values() if len(array))
    assert 0 <= made["2"].data_ptr() - made["0"].data_ptr() - arrays["0"].nbytes < ALIGNMENT
