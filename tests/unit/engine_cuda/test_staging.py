"""Batches arrive as they were, even if the host is already laying out the next ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdserve.engine.attention import AttentionBatch
from pdserve.engine.cuda.copies.staging import Staging
from pdserve.engine.steps.batch import Batch
from tests.fakes.late_copies import LateCopies


class LimitedCopies(LateCopies):
    """As HostCopies, with so much memory to pin at a time."""

    most_bytes = 1 << 20

    def pinned(self, num_bytes: int) -> Tensor:
        if num_bytes > self.most_bytes:
            raise torch.OutOfMemoryError("no memory can be pinned")
        return super().pinned(num_bytes)


def make_batch(num_tokens: int, num_requests: int, width: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(-(10**6), 10**6, shape, generator=generator).to(dtype)

    return Batch(
        token_ids=some(num_tokens, dtype=torch.int64),
        positions=some(num_tokens, dtype=torch.int64),
        attention=AttentionBatch(
            query_start=some(num_requests + 1, dtype=torch.int32),
            context_lens=some(num_requests, dtype=torch.int32),
            # as the engine may have it: part of a wider table
            block_tables=some(num_requests, width + 3, dtype=torch.int32)[:, :width],
            slot_mapping=some(num_tokens, dtype=torch.int64),
        ),
        sampled_rows=some(seed % 3, dtype=torch.int64),
        sampled_requests=[],
    )


def tensors(batch: Batch) -> list[Tensor]:
    a = batch.attention
    return [
        batch.token_ids,
        batch.positions,
        batch.sampled_rows,
        a.query_start,
        a.context_lens,
        a.block_tables,
        a.slot_mapping,
    ]


SIZES = st.tuples(st.integers(1, 40), st.integers(1, 9), st.integers(1, 20))


@given(sizes=st.lists(SIZES, min_size=1, max_size=6))
def test_batches_survive_those_that_follow(sizes: list[tuple[int, int, int]]) -> None:
    copies = LateCopies()
    staging = Staging(copies)
    batches = [make_batch(*size, seed) for seed, size in enumerate(sizes)]
    expected = [[tensor.clone() for tensor in tensors(batch)] for batch in batches]
    uploaded = []
    for batch in batches:
        uploaded.append(staging.upload(batch))
        for tensor in tensors(batch):
            tensor.fill_(-1)  # the engine's own buffers are its own again
    copies.finish()
    for found, wanted in zip(uploaded, expected, strict=True):
        for a, b in zip(tensors(found), wanted, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


def test_the_next_batch_is_laid_out_while_the_last_one_is_copied() -> None:
    copies = LateCopies()
    staging = Staging(copies)
    batch = make_batch(8, 8, 4, 1)
    staging.upload(batch)
    staging.upload(batch)
    assert not any(copy.is_done for copy in copies.started)
    staging.upload(batch)
    assert [copy.is_done for copy in copies.started] == [True, False, False]


def test_steady_steps_are_one_copy_each_and_pin_nothing() -> None:
    copies = LateCopies()
    staging = Staging(copies)
    for _ in range(2):
        staging.upload(make_batch(64, 64, 100, 1))
    pinned = copies.num_pinned
    for width in range(100, 150):
        staging.upload(make_batch(64, 64, width, 1))
    assert copies.num_pinned == pinned
    assert len(copies.started) == 52


def test_two_results_are_fetched_at_a_time() -> None:
    """Also behind one for which no memory could be pinned."""
    copies = LimitedCopies()
    staging = Staging(copies)
    with pytest.raises(torch.OutOfMemoryError):
        staging.fetch(torch.empty(copies.most_bytes, dtype=torch.uint8))
    sources = [torch.full((64,), value, dtype=torch.uint8) for value in (1, 2)]
    fetches = [staging.fetch(source) for source in sources]
    found = [fetch.wait() for fetch in fetches]
    assert [bytes(each) for each in found] == [bytes(each) for each in sources]
