"""Exported pools: shared, sealed, read-only for everybody else."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.memory import ExportedPool, RemotePool, check_generations
from pdserve import _native
from pdserve.shared.errors import PeerLost, StaleTicket


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_pool_starts_as_zeros_of_generation_zero() -> None:
    pool = ExportedPool(3, 1000)
    assert pool.data.shape == (3, 1000)
    assert not pool.data.any()
    assert pool.generations.tolist() == [0, 0, 0]
    pool.close()


def test_a_remote_pool_sees_data_and_generations() -> None:
    pool = ExportedPool(3, 1000)
    remote = RemotePool(os.dup(pool.fd), 3, 1000)
    pool.data[1] = 7
    pool.bump([2, 0, 2])
    assert (remote.flat[1000:2000] == 7).all()
    assert remote.generations.tolist() == [1, 0, 2]
    pool.close()


def test_a_remote_pool_outlives_its_exporter_and_descriptors() -> None:
    before = num_descriptors()
    pool = ExportedPool(2, 64)
    pool.data[:] = 5
    remote = RemotePool(os.dup(pool.fd), 2, 64)
    pool.close()
    pool.close()
    del pool
    assert (remote.flat == 5).all()
    del remote
    assert num_descriptors() == before


def test_a_remote_pool_cannot_be_written() -> None:
    pool = ExportedPool(2, 64)
    remote = RemotePool(os.dup(pool.fd), 2, 64)
    with pytest.raises(ValueError, match="read-only"):
        remote.flat[0] = 1
    with pytest.raises(OSError, match="Operation not permitted"):
        os.ftruncate(pool.fd, 10)
    with pytest.raises(OSError, match="Operation not permitted"):
        os.pwrite(pool.fd, b"x", 0)
    pool.close()


@pytest.mark.parametrize(("num_blocks", "block_bytes"), [(3, 64), (2, 64_000)])
def test_a_pool_of_another_size_is_refused(num_blocks: int, block_bytes: int) -> None:
    pool = ExportedPool(2, 64)
    before = num_descriptors()
    with pytest.raises(PeerLost, match="sealed pool"):
        RemotePool(os.dup(pool.fd), num_blocks, block_bytes)
    assert num_descriptors() == before
    pool.close()


def test_memory_that_can_shrink_under_us_is_refused() -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096 + 16)
    with pytest.raises(PeerLost, match="seals"):
        RemotePool(fd, 2, 64)


def test_a_descriptor_of_something_else_is_refused() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(PeerLost, match="cannot be mapped"):
        RemotePool(reader, 2, 64)


PMD = 2 << 20


def mapped_ranges(name: str) -> list[int]:
    """Where mappings of this name begin in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [int(line.split("-")[0], 16) for line in lines if name in line]


def test_a_pool_lies_where_it_can_have_huge_pages_and_is_unmapped_with_its_last_array() -> None:
    gc.collect()  # pools of other tests do not count
    before = len(mapped_ranges("pdserve-kv"))
    pool = ExportedPool(3, PMD)
    remote = RemotePool(os.dup(pool.fd), 3, PMD)
    assert pool.data.ctypes.data % PMD == remote.flat.ctypes.data % PMD == 0
    assert len(mapped_ranges("pdserve-kv")) == before + 2
    block = pool.data[1]
    pool.close()
    del pool, remote
    block[:] = 9  # it keeps the mapping
    assert len(mapped_ranges("pdserve-kv")) == before + 1
    del block
    assert len(mapped_ranges("pdserve-kv")) == before


def test_committing_a_pool_leaves_its_contents() -> None:
    pool = ExportedPool(2, 3 << 20)
    pool.data[1] = 7
    pool.bump([0])
    has_huge_pages = pool.commit()
    assert not pool.data[0].any()
    assert (pool.data[1] == 7).all()
    assert pool.generations.tolist() == [1, 0]
    assert has_huge_pages == (huge_bytes() > 0)
    pool.close()


@pytest.mark.parametrize("block_bytes", [100_000, 5 << 20])
def test_a_committed_pool_has_all_of_its_pages(block_bytes: int) -> None:
    """Those too that do not fill a huge page."""
    pool = ExportedPool(1, block_bytes)
    before = resident_bytes(pool)
    pool.commit()
    assert before < block_bytes <= resident_bytes(pool)
    pool.close()


def resident_bytes(pool: ExportedPool) -> int:
    """Of the pool's mapping."""
    entry = f"{pool.data.ctypes.data:08x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(entry) for line in lines)
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def huge_bytes() -> int:
    """Shared memory of this process that is in huge pages."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("ShmemPmdMapped"))


def test_what_is_no_file_cannot_be_mapped() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        _native.map_shared(-1, 4096, writable=True)


@pytest.mark.parametrize("block_ids", [[0, 2], [-1]])
def test_bumping_a_block_that_is_not_there_changes_nothing(block_ids: list[int]) -> None:
    pool = ExportedPool(2, 64)
    with pytest.raises(ValueError, match="block id"):
        pool.bump(block_ids)
    assert pool.generations.tolist() == [0, 0]
    pool.close()


def test_a_pool_must_have_blocks() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        ExportedPool(0, 64)


def test_check_generations_names_the_block_and_both_values() -> None:
    generations = np.array([4, 5, 6], dtype=np.uint64)
    ids = np.array([2, 1])
    check_generations(generations, ids, np.array([6, 5], dtype=np.uint64))
    with pytest.raises(StaleTicket, match="block 1 has generation 5, the ticket is for 4"):
        check_generations(generations, ids, np.array([6, 4], dtype=np.uint64))
    with pytest.raises(ValueError, match="block id"):
        check_generations(generations, np.array([3]), np.array([6], dtype=np.uint64))
