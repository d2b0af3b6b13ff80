"""The paged KV pool: the memory that holds keys and values, viewed as one tensor."""

from __future__ import annotations

import math
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.kv import KvDtype, KvLayout
from pdserve.kv.companions import made_up

TORCH_DTYPES: Final[dict[KvDtype, torch.dtype]] = {
    KvDtype.FLOAT32: torch.float32,
    KvDtype.BFLOAT16: torch.bfloat16,
    KvDtype.FLOAT16: torch.float16,
    KvDtype.INT8: torch.int8,
    KvDtype.FP8: torch.uint8,  # bits of float8, which few operations take
}


class DeviceBuffer(Protocol):
    """Externally allocated GPU memory (numba's CUDA array interface)."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The interface, for an array uint8[num_bytes]."""
        ...


class KvCache:
    """The memory of one node's KV pool. The block pool tracks which request owns which block.

    Its `companions` are those of the block pool, once there is one.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        device: torch.device,
        buffer: memoryview | npt.NDArray[np.uint8] | DeviceBuffer | None = None,
    ) -> None:
        """Allocate the pool, or use existing memory for it.

        Args:
            layout: layout of one block.
            num_blocks: number of blocks, companions included.
            device: where the pool is.
            buffer: writable memory of this device, of at least num_blocks * layout.block_bytes
                bytes. It is used in place, neither copied nor cleared, and kept alive.

        Raises:
            ValueError: the buffer is too small, read-only, misaligned or not for this device.
        """
        self.layout = layout
        self.num_blocks = num_blocks
        self.companions = made_up(num_blocks, layout.num_companions)
        shape = (num_blocks, *layout.block_shape)
        dtype = TORCH_DTYPES[layout.dtype]
        self.pool: Tensor  # [num_blocks, *layout.block_shape]
        if buffer is None:
            # Zeroed pages cost nothing until they are touched.
            self.pool = torch.zeros(shape, dtype=dtype, device=device)
        else:
            self.pool = _wrap(buffer, dtype, device, math.prod(shape)).view(shape)


def _wrap(buffer: Any, dtype: torch.dtype, device: torch.device, num_elements: int) -> Tensor:
    data = _bytes_on(device, buffer)
    needed_bytes = num_elements * dtype.itemsize
    if data.numel() < needed_bytes:
        raise ValueError(f"the buffer has {data.numel()} bytes; the KV pool needs {needed_bytes}")
    if data.data_ptr() % 64:
        # 64 bytes are a cache line, and the widest vector load.
        raise ValueError("the buffer of a KV pool must be aligned to 64 bytes")
    return data[:needed_bytes].view(dtype)


def _bytes_on(device: torch.device, buffer: Any) -> Tensor:
    """Return the buffer as a tensor uint8[num_bytes] that shares its memory."""
    if device.type == "cpu":
        if memoryview(buffer).readonly:
            raise ValueError("the buffer of a KV pool must be writable")
        return torch.frombuffer(buffer, dtype=torch.uint8)
    if device.type != "cuda":
        raise ValueError(f"no buffer can be a pool on {device}")
    data = torch.as_tensor(buffer, device=device)
    # as_tensor copies a buffer that is on another device; the exported memory would stay unused.
    if data.data_ptr() != buffer.__cuda_array_interface__["data"][0]:
        raise ValueError(f"the buffer of a KV pool is not on {device}")
    return data
