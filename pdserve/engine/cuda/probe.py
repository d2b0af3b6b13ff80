"""Whether an attention backend works on this GPU: a library that imports may still fail to compile.

It computes one small batch of both kinds of rows, and is compared with plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import torch
from torch import Tensor

from pdserve.engine.attention.interface import AttentionBackend, AttentionBatch
from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.cuda.catalog import AttentionNeeds

_BLOCK_SIZE: Final = 16
Contexts: TypeAlias = tuple[tuple[int, int], ...]  # (rows, KV tokens) of each request
_CONTEXTS: Final = ((3, 21), (1, 33))  # a chunk and a decode row
# Of values up to about 3.
_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}


class AttentionBroken(RuntimeError):
    """A backend computes something else than attention."""


def check_attention(backend: AttentionBackend, needs: AttentionNeeds, device: torch.device) -> None:
    """Compute a small batch.

    Raises:
        AttentionBroken: the result is wrong. Anything else that the backend raises.
    """
    trial = Trial(_CONTEXTS, needs, device)
    expected, found = (
        trial.attend(each.attend).float() for each in (ReferenceAttention(), backend)
    )
    error = float((expected - found).abs().max())
    if not error <= _TOLERANCE[needs.dtype]:
        raise AttentionBroken(f"{backend.name} is off by {error:.2g}")


class Trial:
    """A batch of random numbers on a device, of a pool with one layer."""

    def __init__(self, contexts: Contexts, needs: AttentionNeeds, device: torch.device) -> None:
        """Make one with the model's heads, and these requests."""
        random = torch.Generator(device).manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device=device).to(needs.dtype)

        on_host = _batch(contexts)
        num_blocks = int(on_host.block_tables.max()) + 1
        self._batch = _moved(on_host, device)
        self._pool = drawn(num_blocks, 1, 2, needs.num_kv_heads, _BLOCK_SIZE, needs.head_dim)
        num_rows = sum(rows for rows, _ in contexts)
        self._query = drawn(num_rows, needs.num_heads, needs.head_dim)
        self._scale = needs.head_dim**-0.5

    def attend(self, attend: Callable[..., Tensor]) -> Tensor:
        """Return what a function like AttentionBackend.attend computes of it."""
        return attend(
            self._query, self._pool, 0, self._batch, scale=self._scale, sliding_window=None
        )


def _batch(contexts: Contexts) -> AttentionBatch:
    starts, tables, slots = [0], [], []
    num_blocks = 0
    for rows, context in contexts:
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
        return torch.tensor(values, dtype=dtype)

    return AttentionBatch(
        query_start=ints(starts),
        context_lens=ints([context for _, context in contexts]),
        block_tables=ints([table + [0] * (width - len(table)) for table in tables]),
        slot_mapping=ints(slots, torch.int64),
    )


def _moved(batch: AttentionBatch, device: torch.device) -> AttentionBatch:
    return AttentionBatch(
        query_start=batch.query_start.to(device),
        context_lens=batch.context_lens.to(device),
        block_tables=batch.block_tables.to(device),
        slot_mapping=batch.slot_mapping.to(device),
        on_host=batch,
    )
