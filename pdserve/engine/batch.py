"""The tensors of one step, built from its plan, as input to the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.engine.attention import AttentionBatch
from pdserve.engine.request import Request, Scheduled


@dataclass(frozen=True, slots=True)
class WantedStates:
    """Rows of a batch whose final hidden states the caller needs. Both tensors are on the host."""

    rows: Tensor  # [num_states] int64, ascending
    out: Tensor  # [num_states, hidden_size] float32, written by the decoder

    def within(self, begin: int, end: int) -> WantedStates | None:
        """Return the part for the rows [begin, end), with row numbers from `begin`, or None."""
        first, last = torch.searchsorted(self.rows, torch.tensor([begin, end])).tolist()
        if first == last:
            return None
        return WantedStates(self.rows[first:last] - begin, self.out[first:last])


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one step. Prompt chunks and decode tokens have the same form: rows of tokens."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64, of each token in its sequence
    attention: AttentionBatch
    sampled_rows: Tensor  # [num_sampled] int64, the rows whose logits are needed
    sampled_requests: list[Request]  # [num_sampled], in the plan's order
    states: WantedStates | None = None  # final states that are needed as well

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device, or itself if it is already there."""
        if self.token_ids.device == device:
            return self
        attention = self.attention
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            attention=AttentionBatch(
                query_start=attention.query_start.to(device),
                context_lens=attention.context_lens.to(device),
                block_tables=attention.block_tables.to(device),
                slot_mapping=attention.slot_mapping.to(device),
            ),
            sampled_rows=self.sampled_rows.to(device),
        )


def build_batch(rows: Sequence[Scheduled], block_size: int, device: torch.device) -> Batch:
    """Build the batch of a plan: for each request in order, its next `num_tokens` tokens.

    This is the simple implementation for a single step, and the reference for `step_batches.py`,
    which must give the same result. The requests' block tables must cover these tokens. Requests
    are only read.

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
    samples = [index for index, row in enumerate(rows) if row.samples]

    def tensor(array: npt.NDArray[np.int64], dtype: type[np.signedinteger]) -> Tensor:
        return torch.from_numpy(array.astype(dtype, copy=False)).to(device, non_blocking=True)

    return Batch(
        token_ids=tensor(_token_ids(rows), np.int64),
        positions=tensor(positions, np.int64),
        attention=AttentionBatch(
            query_start=tensor(query_start, np.int32),
            context_lens=tensor(context_lens, np.int32),
            block_tables=tensor(block_tables, np.int32),
            slot_mapping=tensor(slots, np.int64),
        ),
        sampled_rows=tensor(query_start[1:][samples] - 1, np.int64),
        sampled_requests=[rows[index].request for index in samples],
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
