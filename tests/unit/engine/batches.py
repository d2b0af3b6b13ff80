"""A step as a batch, both ways: in kept memory, and by the definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdserve.engine.request import Scheduled
from pdserve.engine.steps.batch import Batch
from pdserve.engine.steps.batches import StepBatches
from tests.plain_batch import build_batch

BLOCK = 4
CPU = torch.device("cpu")


def step_batches() -> StepBatches:
    """Of engines whose blocks have `BLOCK` tokens."""
    return StepBatches(BLOCK)


def plain_batch(rows: Sequence[Scheduled]) -> Batch:
    """The definition."""
    return build_batch(rows, BLOCK, CPU)


def assert_same(batch: Batch, plain: Batch) -> None:
    """But for what stands behind a context in a block table, which nobody reads."""
    assert batch.sampled_requests == plain.sampled_requests
    for name in ("token_ids", "positions", "sampled_rows"):
        assert getattr(batch, name).tolist() == getattr(plain, name).tolist(), name
        assert getattr(batch, name).dtype == getattr(plain, name).dtype, name
    attention, expected = batch.attention, plain.attention
    for name in ("query_start", "context_lens", "slot_mapping"):
        assert getattr(attention, name).tolist() == getattr(expected, name).tolist(), name
        assert getattr(attention, name).dtype == getattr(expected, name).dtype, name
    assert attention.block_tables.dtype == expected.block_tables.dtype
    for length, table, plain_table in zip(
        expected.context_lens.tolist(),
        attention.block_tables.tolist(),
        expected.block_tables.tolist(),
        strict=True,
    ):
        num_blocks = -(-length // BLOCK)
        assert table[:num_blocks] == plain_table[:num_blocks]
