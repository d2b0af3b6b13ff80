"""The batch of a step by the definition of its tensors: the reference for `steps/batches.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.engine.attention import AttentionBatch
from pdserve.engine.request import Scheduled
from pdserve.engine.steps.batch import Batch


def build_batch(rows: Sequence[Scheduled], block_size: int, device: torch.device) -> Batch:
    """Build the batch of a plan: for each request in order, its next `num_tokens` tokens.

    The requests' block tables must cover these tokens. Requests are only read.

    Args:
        rows: at least one row, each with at least one token.
        block_size: tokens per KV block.
        device: where to put the tensors.
    """
    num_tokens = np.array([row.num_tokens for row in rows], dtype=np.int64)
    computed = np.array([row.request.num_computed_tokens for row in rows], dtype=np.int64)
    context_lens = computed + num_tokens
    query_start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(num_tokens, out=query_start[1:])
    owner = np.repeat(np.arange(len(rows)), num_tokens)  # [num_tokens] row -> index of request
    positions = np.arange(query_start[-1]) - query_start[owner] + computed[owner]
    block_tables = _block_tables(rows, context_lens, block_size)
    slots = block_tables[owner, positions // block_size] * block_size + positions % block_size
    are_long = np.array([row.request.prompt.is_long for row in rows])
    samples = [index for index, row in enumerate(rows) if row.samples]

    def tensor(array: npt.NDArray[np.int64], dtype: type[np.signedinteger]) -> Tensor:
        return torch.from_numpy(array.astype(dtype, copy=False)).to(device, non_blocking=True)

    names = [row.request.prompt.adapter for row in rows]
    return Batch(
        token_ids=tensor(_token_ids(rows), np.int64),
        positions=tensor(np.where(are_long[owner], -1 - positions, positions), np.int64),
        attention=AttentionBatch(
            query_start=tensor(query_start, np.int32),
            context_lens=tensor(context_lens, np.int32),
            block_tables=tensor(block_tables, np.int32),
            slot_mapping=tensor(slots, np.int64),
        ),
        sampled_rows=tensor(query_start[1:][samples] - 1, np.int64),
        sampled_requests=[rows[index].request for index in samples],
        adapters=tuple(names) if any(names) else (),
        adapted_from=tuple(r.request.prompt.adapted_from for r in rows) if any(names) else (),
    )


def _token_ids(rows: Sequence[Scheduled]) -> npt.NDArray[np.int64]:
    """Return the token ids of all rows, concatenated: [num_tokens]."""
    token_ids: list[int] = []
    for row in rows:
        start = row.request.num_computed_tokens
        chunk = row.request.token_slice(start, start + row.num_tokens)
        assert 0 < len(chunk) == row.num_tokens, "a row computes tokens that the request has"
        token_ids += chunk
    return np.array(token_ids, dtype=np.int64)


def _block_tables(
    rows: Sequence[Scheduled], context_lens: npt.NDArray[np.int64], block_size: int
) -> npt.NDArray[np.int64]:
    """Return the block tables as [num_requests, max_blocks], padded with 0."""
    num_blocks = -(-context_lens // block_size)
    tables = np.zeros((len(rows), int(num_blocks.max())), dtype=np.int64)
    for index, (row, count) in enumerate(zip(rows, num_blocks.tolist(), strict=True)):
        table = row.request.block_table
        assert len(table) >= count, "a scheduled request has blocks for what it computes"
        tables[index, :count] = table[:count]
    return tables
