"""A step's plan as the tensors that the model computes on."""

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
    """Rows whose final states are wanted, whatever else is. On the host, like `out`."""

    rows: Tensor  # [num_states] int64, ascending
    out: Tensor  # [num_states, hidden_size] float32: the decoder puts them there

    def within(self, begin: int, end: int) -> WantedStates | None:
        """Those of the rows [begin, end), as of a batch that begins there; None: there are none."""
        first, last = torch.searchsorted(self.rows, torch.tensor([begin, end])).tolist()
        if first == last:
            return None
        return WantedStates(self.rows[first:last] - begin, self.out[first:last])


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Chunks of prompts and decode tokens look alike: rows of the newest tokens."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64, of each token in its sequence
    attention: AttentionBatch
    sampled_rows: Tensor  # [num_sampled] int64, the rows whose logits are sampled from
    sampled_requests: list[Request]  # [num_sampled], in the plan's order
    states: WantedStates | None = None  # final states that are wanted besides

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; itself if it is there."""
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
    """Lay out a plan: its requests in order, of each the next `num_tokens` tokens without KV.

    The plain way, for a step on its own, and what `step_batches.py` must come out as. The requests'
    block tables must cover those tokens; the requests are only read.

    Args:
        rows: at least one, each of at least one token.
        block_size: tokens in a KV block.
        device: of the tensors.
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
    """[num_tokens], request after request."""
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
    """[num_requests, max_blocks]: the blocks of each context, and 0 in the places behind them."""
    num_blocks = -(-context_lens // block_size)
    tables = np.zeros((len(rows), int(num_blocks.max())), dtype=np.int64)
    for index, (row, count) in enumerate(zip(rows, num_blocks.tolist(), strict=True)):
        table = row.request.block_table
        assert len(table) >= count, "a scheduled request has blocks for what it computes"
        tables[index, :count] = table[:count]
    return tables
