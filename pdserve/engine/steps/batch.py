"""The tensors of one step, the input to the model. `batches.py` lays them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.attention import AttentionBatch
from pdserve.engine.request import Request


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


@dataclass(slots=True, eq=False)
class Taps:
    """The sampled rows of the residual stream before some layers. On the host."""

    layers: Tensor  # [num_taps] int64
    out: Tensor  # [num_sampled, num_taps, hidden_size] float32, written by the decoder
    wait: Callable[[], object] = lambda: None  # until a device has written it


@dataclass(frozen=True, slots=True)
class Spread:
    """How a pool has layers in several blocks (`pdserve/kv/companions.py`). On the host."""

    companions: Tensor  # [num_blocks, num_companions] int32, of the blocks in block tables
    places: Tensor  # [num_layers, 2] int32: which block has a layer (0: the first), where in it

    def batches(self, first: AttentionBatch, block_size: int) -> list[AttentionBatch]:
        """Return the metadata of each block's layers, given that of the first blocks'.

        Block 0 stands for companions that have been given back, which nobody reads.
        """
        offsets = first.slot_mapping % block_size
        written = torch.div(first.slot_mapping, block_size, rounding_mode="floor")
        found = [first]
        for kind in self.companions.clamp(min=0).unbind(1):
            slots = kind[written].long() * block_size + offsets
            tables = kind[first.block_tables.long()]
            found.append(replace(first, block_tables=tables, slot_mapping=slots))
        return found


@dataclass(slots=True, eq=False)
class Cargo:
    """Tensors of the host that the rest of the step needs on the device: they go with the batch.

    A decoder that uploads a batch uploads its cargo as well, in the same copy.
    """

    tensors: list[Tensor]
    arrived: list[Tensor] | None = None  # the same on the device, once they are there


@dataclass(frozen=True, slots=True)
class StateTables:
    """Where the states of a step's requests are, on the host."""

    # [num_requests, 3, state_blocks] int32: blocks of each one's own state, of what is its state
    # before the step, and of what it is kept in
    blocks: Tensor
    kept_after: Tensor  # [num_requests] int32: rows of the step after which it is; 0: it is not

    @classmethod
    def own(cls, tables: Tensor) -> StateTables:
        """Of requests that go on with their own states, [num_requests, state_blocks]."""
        blocks = tables[:, None].expand(-1, 3, -1).contiguous().int()
        return cls(blocks, torch.zeros(len(tables), dtype=torch.int32))

    def within(
        self, requests: slice, num_before: NDArray[np.int32], num_rows: NDArray[np.int32]
    ) -> StateTables:
        """Of some requests, of each only so many rows of the step, behind `num_before`."""
        blocks = self.blocks[requests].clone()
        goes_on = torch.from_numpy(num_before > 0)
        blocks[goes_on, 1] = blocks[goes_on, 0]
        after = self.kept_after[requests] - torch.from_numpy(num_before).int()
        is_in = (after > 0) & (after <= torch.from_numpy(num_rows))
        return StateTables(blocks, torch.where(is_in, after, 0).int())


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one step. Prompt chunks and decode tokens have the same form: rows of tokens."""

    token_ids: Tensor  # [num_tokens] int64; of a step that runs ahead, -1 - i is sampled_before[i]
    positions: Tensor  # [num_tokens] int64, of each token in its sequence; -1 - position: of a
    # long request (`Prompt.is_long`), whose rotary embedding may be another
    attention: AttentionBatch
    sampled_rows: Tensor  # [num_sampled] int64, the rows whose logits are needed
    sampled_requests: list[Request]  # [num_sampled], in the plan's order
    # [num_requests], the digest of each one's adapter, "" for none; (): none has one
    adapters: tuple[str, ...] = ()
    adapted_from: tuple[int, ...] = ()  # likewise: the first position that it computes
    states: WantedStates | None = None  # final states that are needed as well
    taps: Taps | None = None  # of decoders that compute all layers
    spread: Spread | None = None  # None: all layers of a token are in one block
    state_tables: StateTables | None = None  # None: no layer has a state
    cargo: Cargo | None = None  # what else goes to the device
    sampled_before: Tensor | None = (
        None  # int32 on the device: by the step before, launched as well
    )

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
