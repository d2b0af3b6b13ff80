from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from pdserve.engine.kv.cache import KvCache
from pdserve.kv import KvDtype, KvLayout

LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, head_dim=8, block_size=4, dtype=KvDtype.BFLOAT16)
CPU = torch.device("cpu")


def test_a_pool_has_the_layouts_shape_and_contiguous_blocks() -> None:
    cache = KvCache(LAYOUT, 5, CPU)
    assert cache.pool.shape == (5, 2, 2, 3, 4, 8)
    assert cache.pool.dtype == torch.bfloat16
    assert cache.pool[1].is_contiguous()
    assert cache.pool[0].nbytes == LAYOUT.block_bytes


@pytest.mark.parametrize("kind", ["mmap", "array"])
def test_over_a_buffer_without_copying(kind: str) -> None:
    memory = mmap.mmap(-1, 6 * LAYOUT.block_bytes)
    view = memoryview(memory)
    buffer = view if kind == "mmap" else np.frombuffer(view, dtype=np.uint8)
    cache = KvCache(LAYOUT, 5, CPU, buffer)
    cache.pool[1, 0, 0, 0, 0, 0] = 1.0
    start = LAYOUT.block_bytes
    assert memory[start : start + 2] == b"\x80\x3f"
    memory[start : start + 2] = b"\x00\x40"
    assert cache.pool[1, 0, 0, 0, 0, 0] == 2.0


def test_an_unfit_buffer_is_refused() -> None:
    size = 5 * LAYOUT.block_bytes
    memory = np.zeros(size + 128, dtype=np.uint8)
    aligned = memory[-memory.ctypes.data % 64 :]
    with pytest.raises(ValueError, match="needs"):
        KvCache(LAYOUT, 5, CPU, aligned[: size - 1])
    with pytest.raises(ValueError, match="aligned"):
        KvCache(LAYOUT, 5, CPU, aligned[2:])
    with pytest.raises(ValueError, match="writable"):
        KvCache(LAYOUT, 5, CPU, memoryview(bytes(size)))
    with pytest.raises(ValueError, match="meta"):
        KvCache(LAYOUT, 5, torch.device("meta"), aligned)
