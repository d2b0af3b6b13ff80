"""The tensors of a step, against the definition of each."""

from __future__ import annotations

import pytest
import torch

from pdserve.engine.request import Request, Scheduled
from tests.plain_batch import build_batch
from tests.requests import make_request
from tests.unit.engine_model.harness import CPU

BLOCK = 4


def request(num_prompt: int, num_output: int, computed: int, table: list[int]) -> Request:
    made = make_request(range(100, 100 + num_prompt), range(200, 200 + num_output))
    made.num_computed_tokens = computed
    made.block_table = table
    return made


def test_prefill_chunks_and_decodes_together() -> None:
    rows = [
        Scheduled(request(9, 0, 3, [5, 2, 7]), 4),  # a chunk from the middle
        Scheduled(request(5, 2, 6, [9, 1]), 1),  # a decode
        Scheduled(request(2, 3, 0, [3, 4, 8]), 5),  # all over again, prompt and output
        Scheduled(request(1, 0, 0, [6]), 1),
    ]
    batch = build_batch(rows, BLOCK, CPU)
    tokens = [103, 104, 105, 106, 201, 100, 101, 200, 201, 202, 100]
    assert batch.token_ids.tolist() == tokens
    assert batch.positions.tolist() == [3, 4, 5, 6, 6, 0, 1, 2, 3, 4, 0]
    attention = batch.attention
    assert attention.query_start.tolist() == [0, 4, 5, 10, 11]
    assert attention.context_lens.tolist() == [7, 7, 5, 1]
    assert attention.block_tables.tolist() == [[5, 2], [9, 1], [3, 4], [6, 0]]
    assert attention.slot_mapping.tolist() == [23, 8, 9, 10, 6, 12, 13, 14, 15, 16, 24]
    assert batch.sampled_rows.tolist() == [4, 9, 10]
    assert batch.sampled_requests == [row.request for row in rows[1:]]
    assert attention.query_start.dtype == torch.int32
    assert attention.block_tables.dtype == torch.int32
    assert attention.slot_mapping.dtype == torch.int64


def test_a_chunk_that_does_not_end_its_prompt_samples_nothing() -> None:
    batch = build_batch([Scheduled(request(9, 0, 0, [5, 2, 7]), 8)], BLOCK, CPU)
    assert batch.sampled_rows.tolist() == []
    assert batch.sampled_requests == []


def test_our_own_bugs_are_asserted() -> None:
    with pytest.raises(AssertionError, match="has blocks"):
        build_batch([Scheduled(request(9, 0, 0, [5]), 8)], BLOCK, CPU)
    with pytest.raises(AssertionError, match="tokens that the request has"):
        build_batch([Scheduled(request(3, 0, 0, [5, 6]), 4)], BLOCK, CPU)
