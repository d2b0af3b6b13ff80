"""Which steps a graph takes, what it is given, and that filling rows stay out of it all."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pdserve.engine.cuda.capture.graphs import (
    BUCKETS,
    CARGO_BYTES,
    DecodeGraphs,
    DecodeInputs,
    buckets_for,
)
from pdserve.engine.cuda.copies.staging import Staging
from pdserve.engine.cuda.layers.forward import StepInputs
from pdserve.engine.steps.batch import Batch, Cargo
from tests.fakes.graphs import Recorded
from tests.fakes.late_copies import PromptCopies
from tests.unit.engine_cuda.test_staging import make_batch

pytestmark = pytest.mark.usefixtures("interpreted")

CPU = torch.device("cpu")
VOCAB = 3
BLOCK_SIZE = 8


class Step:
    """Logits that tell what the step was given: token, position and slot of each row."""

    def __init__(self) -> None:
        self.inputs: list[StepInputs] = []

    def __call__(self, inputs: StepInputs) -> Tensor:
        self.inputs.append(inputs)
        columns = [inputs.token_ids, inputs.positions, inputs.attention.slot_mapping]
        return torch.stack(columns, dim=1).float()


def make_graphs(
    buckets: tuple[int, ...] = (1, 2, 4), max_bytes: int = 1 << 40
) -> tuple[DecodeGraphs, Recorded, Step]:
    recorder, step = Recorded(), Step()
    inputs = DecodeInputs(buckets[-1], 5, CPU)
    logits = torch.full((buckets[-1], VOCAB), float("nan"))
    graphs = DecodeGraphs(recorder, inputs, logits, BLOCK_SIZE, buckets, max_bytes)
    graphs.record(step)
    return graphs, recorder, step


def decode_batch(num_requests: int, seed: int = 1, width: int = 4) -> Batch:
    """Of contexts that fill one block more each."""
    batch = make_batch(num_requests, num_requests, width, seed)
    lens = (torch.arange(num_requests, dtype=torch.int32) % width + 1) * BLOCK_SIZE - 3
    return replace(
        batch,
        attention=replace(batch.attention, context_lens=lens),
        sampled_rows=torch.arange(num_requests),
    )


def staging() -> Staging:
    return Staging(PromptCopies())


def test_capturing_touches_no_block() -> None:
    """All rows are filling ones then: no slot, no context."""
    _, recorder, step = make_graphs()
    assert [len(inputs.token_ids) for inputs in step.inputs] == [1, 2, 4]
    assert len(recorder.recordings) == 3
    for inputs in step.inputs:
        assert (inputs.attention.slot_mapping == -1).all()
        assert (inputs.attention.context_lens == 0).all()
        assert inputs.attention.query_start.tolist() == list(range(len(inputs.token_ids) + 1))


@pytest.mark.parametrize(("num_requests", "bucket"), [(1, 0), (2, 1), (3, 2), (4, 2)])
def test_a_batch_goes_to_the_smallest_graph_that_has_room(num_requests: int, bucket: int) -> None:
    graphs, recorder, step = make_graphs()
    batch = decode_batch(num_requests)
    assert graphs.takes(batch)
    found = graphs.logits(batch, staging())
    columns = [batch.token_ids, batch.positions, batch.attention.slot_mapping]
    assert torch.equal(found, torch.stack(columns, dim=1).float())
    assert [r.num_replays for r in recorder.recordings] == [int(i == bucket) for i in range(3)]
    given = step.inputs[-1].attention
    assert torch.equal(given.context_lens[:num_requests], batch.attention.context_lens)
    for row in range(num_requests):
        blocks = batch.attention.block_tables[row, : row % 4 + 1]
        assert torch.equal(given.block_tables[row, : len(blocks)], blocks)


def test_rows_of_the_batch_before_are_gone() -> None:
    graphs, _, step = make_graphs()
    graphs.logits(decode_batch(4), staging())
    graphs.logits(decode_batch(3, seed=2), staging())
    given = step.inputs[-1].attention
    assert len(given.context_lens) == 4
    assert int(given.context_lens[3]) == 0
    assert int(given.slot_mapping[3]) == -1


@pytest.mark.parametrize(("num_bytes", "num_copies"), [(40, 1), (CARGO_BYTES + 999, 2)])
def test_cargo_goes_with_the_batch(num_bytes: int, num_copies: int) -> None:
    """In one copy, as long as there is room where the graph has its inputs."""
    graphs, _, step = make_graphs()
    copies = PromptCopies()
    cargo = Cargo([torch.arange(3), torch.full((num_bytes,), 7, dtype=torch.uint8)])
    batch = replace(decode_batch(2), cargo=cargo)
    graphs.logits(batch, Staging(copies))
    assert len(copies.started) == num_copies
    assert cargo.arrived is not None
    for found, wanted in zip(cargo.arrived, cargo.tensors, strict=True):
        assert torch.equal(found, wanted)
        assert found.data_ptr() != wanted.data_ptr()
    assert torch.equal(step.inputs[-1].token_ids[:2], batch.token_ids)


def test_what_no_graph_takes() -> None:
    graphs, _, _ = make_graphs()
    batch = decode_batch(3)
    assert graphs.takes(batch)
    assert not graphs.takes(decode_batch(5)), "more rows than the largest graph has"
    assert not graphs.takes(decode_batch(3, width=6)), "a context longer than the tables"
    assert not graphs.takes(replace(batch, sampled_rows=torch.arange(2))), "a row is not sampled"
    chunk = replace(make_batch(4, 3, 4, 1), sampled_rows=torch.arange(3))
    assert not graphs.takes(chunk), "a row is not sampled"


def test_each_draft_has_a_row_of_its_own() -> None:
    """It sees the blocks of its request, up to its own place."""
    graphs, recorder, step = make_graphs()
    batch = decode_batch(2)
    attention = replace(
        batch.attention,
        query_start=torch.tensor([0, 1, 4], dtype=torch.int32),
        slot_mapping=torch.arange(4),
    )
    numbers = {"token_ids": torch.arange(4) + 7, "positions": torch.arange(4)}
    drafted = replace(batch, **numbers, attention=attention, sampled_rows=torch.arange(4))
    assert graphs.takes(drafted)
    found = graphs.logits(drafted, staging())
    assert found[:, 0].tolist() == [7, 8, 9, 10]
    assert [r.num_replays for r in recorder.recordings] == [0, 0, 1]
    given, (first, second) = step.inputs[-1].attention, attention.context_lens.tolist()
    assert given.context_lens.tolist() == [first, second - 2, second - 1, second]
    for row, owner in enumerate([0, 1, 1, 1]):
        blocks = attention.block_tables[owner, : owner + 1]
        assert torch.equal(given.block_tables[row, : owner + 1], blocks)


def test_a_chunk_that_is_scored_is_no_draft() -> None:
    """Its rows would read the whole context each."""
    graphs, _, _ = make_graphs(buckets=(1, 64))
    batch = decode_batch(2)
    starts = torch.tensor([0, 1, 41], dtype=torch.int32)
    rows = {"token_ids": torch.zeros(41, dtype=torch.int64), "sampled_rows": torch.arange(41)}
    assert not graphs.takes(
        replace(batch, **rows, attention=replace(batch.attention, query_start=starts))
    )


def test_memory_bounds_the_graphs_from_the_largest_down() -> None:
    graphs, recorder, _ = make_graphs(max_bytes=2 << 20)
    assert len(recorder.recordings) == 2
    assert graphs.largest == 2
    assert graphs.takes(decode_batch(2))
    assert not graphs.takes(decode_batch(3))


@pytest.mark.parametrize(
    ("most_rows", "expected"), [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (1000, BUCKETS)]
)
def test_no_graph_is_larger_than_a_step(most_rows: int, expected: tuple[int, ...]) -> None:
    assert buckets_for(most_rows) == expected


def test_buckets_waste_at_most_half_of_a_graph_s_rows() -> None:
    assert list(BUCKETS) == sorted(set(BUCKETS))
    assert BUCKETS[0] == 1
    assert all(b <= 2 * a for a, b in pairwise(BUCKETS))
