"""Whether an attention backend works on this GPU: a library that imports may still fail to compile.

It computes one small batch of both kinds of rows, and is compared with plain torch.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pdserve.engine.attention.interface import AttentionBackend, AttentionBatch
from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.cuda.catalog import AttentionNeeds

_BLOCK_SIZE: Final = 16
_NUM_HEADS: Final = 4
_NUM_KV_HEADS: Final = 2
_CONTEXTS: Final = ((3, 21), (1, 33))  # (rows, KV tokens) of a chunk and of a decode row
# Of values up to about 3.
_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}


class AttentionBroken(RuntimeError):
    """A backend computes something else than attention."""


def check_attention(backend: AttentionBackend, needs: AttentionNeeds, device: torch.device) -> None:
    """Compute a small batch.

    Raises:
        AttentionBroken: the result is wrong. Anything else that the backend raises.
    """
    batch = _batch(device)
    random = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device, needs.dtype)

    num_rows = sum(rows for rows, _ in _CONTEXTS)
    num_blocks = int(batch.block_tables.max()) + 1
    pool = drawn(num_blocks, 1, 2, _NUM_KV_HEADS, _BLOCK_SIZE, needs.head_dim)
    query = drawn(num_rows, _NUM_HEADS, needs.head_dim)
    scale = needs.head_dim**-0.5
    expected, found = (
        each.attend(query, pool, 0, batch, scale=scale, sliding_window=None).float()
        for each in (ReferenceAttention(), backend)
    )
    error = float((expected - found).abs().max())
    if not error <= _TOLERANCE[needs.dtype]:
        raise AttentionBroken(f"{backend.name} is off by {error:.2g}")


def _batch(device: torch.device) -> AttentionBatch:
    starts, tables, slots = [0], [], []
    num_blocks = 0
    for rows, context in _CONTEXTS:
        starts.append(starts[-1] + rows)
        blocks = list(range(num_blocks, num_blocks + -(-context // _BLOCK_SIZE)))
        num_blocks += len(blocks)
        slots += [
            blocks[p // _BLOCK_SIZE] * _BLOCK_SIZE + p % _BLOCK_SIZE
            for p in range(context - rows, context)
        ]
        tables.append(blocks)
    width = max(map(len, tables))

    def ints(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return AttentionBatch(
        query_start=ints(starts),
        context_lens=ints([context for _, context in _CONTEXTS]),
        block_tables=ints([table + [0] * (width - len(table)) for table in tables]),
        slot_mapping=ints(slots, torch.int64),
    )
