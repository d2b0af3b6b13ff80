"""What all heads have in common: their interface, and the KV that they keep of streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from pdserve.engine.attention import AttentionBatch
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.steps.batch import Batch

BLOCK_TOKENS: Final = 64


class HeadKv:
    """Blocks of one stream, and what a head keeps in them. Not touched while it drafts."""

    def __init__(self, pool: BlockPool, most_tokens: int) -> None:
        """`most_tokens`: that drafts attend to; of more, the oldest block is forgotten."""
        self._pool = pool
        self._most_blocks = pool.blocks_for(most_tokens)
        self.block_table: list[int] = []
        self.num_tokens = 0  # that it knows; drafts are written behind them

    def has_room(self, number: int) -> bool:
        """Have room for so many tokens more; else none is kept, and others may have the blocks."""
        while self._pool.blocks_for(self.num_tokens + number) > self._most_blocks:
            self.block_table.append(self.block_table.pop(0))
            self.num_tokens -= self._pool.block_size
        missing = self._pool.blocks_for(self.num_tokens + number) - len(self.block_table)
        if missing > self._pool.num_free:
            self.give_back()
            return False
        self.block_table += self._pool.allocate(max(0, missing))
        return True

    def give_back(self) -> None:
        """Keep nothing of the stream."""
        self._pool.release(self.block_table)
        self.block_table = []
        self.num_tokens = 0


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Consecutive tokens of one stream, for a layer of a head to go on from."""

    tokens: Sequence[int]  # their ids in the model's vocabulary
    states: Tensor  # [len(tokens), hidden], of what is before each: `entered`, or from `step`
    position: int  # of the first token, in the stream
    slot: int  # where its KV goes: behind what the head keeps
    block_table: Sequence[int]  # has room for theirs


def laid_out(parts: Sequence[HeadRows]) -> Batch:
    """Return them as a batch on the host, each stream's last row sampled.

    Positions are those in what is kept of a stream.
    """
    counts = torch.tensor([len(part.tokens) for part in parts])
    slots = [range(part.slot, part.slot + len(part.tokens)) for part in parts]
    query_start = torch.zeros(len(parts) + 1, dtype=torch.int32)
    query_start[1:] = counts.cumsum(0)
    most_blocks = max(len(part.block_table) for part in parts)
    tables = torch.tensor(
        [[*part.block_table, *[0] * (most_blocks - len(part.block_table))] for part in parts],
        dtype=torch.int32,
    )
    return Batch(
        token_ids=torch.tensor([token for part in parts for token in part.tokens]),
        positions=torch.tensor([slot for each in slots for slot in each]),
        attention=AttentionBatch(
            query_start=query_start,
            context_lens=torch.tensor([each.stop for each in slots], dtype=torch.int32),
            block_tables=tables,
            slot_mapping=torch.tensor(
                [
                    part.block_table[slot // BLOCK_TOKENS] * BLOCK_TOKENS + slot % BLOCK_TOKENS
                    for part, each in zip(parts, slots, strict=True)
                    for slot in each
                ]
            ),
        ),
        sampled_rows=query_start[1:].long() - 1,
        sampled_requests=[],
    )


class Head(Protocol):
    """A loaded head."""

    @property
    def name(self) -> str:
        """Its kind and weights: heads of one name go on from the same rows."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the model before which it wants rows; (): those behind the last norm."""

    @property
    def width(self) -> int:
        """Numbers of a row."""

    @property
    def num_layers(self) -> int:
        """Each has the states of the one before it, and drafts a token further.

        The last one goes on from its own.
        """

    @property
    def most_tokens(self) -> int:
        """How many tokens of a stream its drafts attend to."""

    @property
    def pool(self) -> BlockPool:
        """The blocks of its KV, which no other node ever has."""

    @property
    def block_bytes(self) -> int:
        """Memory of one of them."""

    def entered(self, rows: Tensor) -> Tensor:
        """Make [n, hidden] of rows of the model, [n, width]."""

    def step(self, parts: Sequence[HeadRows], layer: int = 0) -> list[tuple[int, Tensor]]:
        """Have a layer compute tokens of some streams, in the thread that computes steps.

        Returns of each the id of the likeliest token behind its last one, and the states to go on
        from, as `HeadRows.states`.
        """
