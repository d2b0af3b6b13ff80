"""Parts of a step: each is what a step of its rows would be, and together they are the step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdserve.engine.request import Scheduled
from pdserve.engine.steps.batch import Batch, Cargo, WantedStates
from pdserve.engine.steps.parts import in_parts
from pdserve.engine.steps.worst import largest_part, num_parts
from tests.plain_batch import build_batch
from tests.requests import make_request
from tests.unit.engine_model.harness import make_prompt

BLOCK = 16
PLAN = ((40, 16, 20), (5, 0, 5), (33, 32, 1), (9, 8, 1), (30, 0, 7))  # prompt, computed, chunk


@pytest.fixture
def batch() -> Batch:
    """Chunks at the beginning, in the middle and at the end of prompts: 34 rows."""
    rows = []
    for number, (length, computed, chunk) in enumerate(PLAN):
        request = make_request(make_prompt(length, seed=number), request_id=str(number))
        request.block_table = [10 * number + block for block in (3, 0, 7)]
        request.num_computed_tokens = computed
        rows.append(Scheduled(request, chunk))
    return build_batch(rows, BLOCK, torch.device("cpu"))


def owners(batch: Batch) -> list[int]:
    """The place of each row's request in the batch."""
    return torch.repeat_interleave(batch.attention.query_start.diff()).tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 34])
def test_parts_are_the_rows_of_the_step_with_what_is_before_them(batch: Batch, count: int) -> None:
    parts = in_parts(batch, count)
    sizes = [len(part.token_ids) for part in parts]
    assert (len(parts), sum(sizes)) == (count, 34)
    assert max(sizes) - min(sizes) <= 1
    for name in ("token_ids", "positions"):
        assert torch.cat([getattr(part, name) for part in parts]).equal(getattr(batch, name))
    slots = torch.cat([part.attention.slot_mapping for part in parts])
    assert slots.equal(batch.attention.slot_mapping)
    tables = [batch.attention.block_tables[owner] for owner in owners(batch)]
    found = []
    for part in parts:
        attention, rows = part.attention, owners(part)
        assert len(attention.query_start) == len(attention.context_lens) + 1
        assert attention.query_start.dtype == attention.context_lens.dtype == torch.int32
        found += [attention.block_tables[row] for row in rows]
        lasts = attention.query_start[1:].long() - 1
        assert (part.positions[lasts] + 1).equal(attention.context_lens.long())
    assert torch.stack(found).equal(torch.stack(tables))


@pytest.mark.parametrize("count", [2, 3, 34])
def test_results_are_asked_of_the_parts_that_have_their_rows(batch: Batch, count: int) -> None:
    states = WantedStates(torch.tensor([0, 16, 17, 33]), torch.zeros(4, 1))
    parts = in_parts(replace(batch, states=states), count)
    firsts = [sum(len(before.token_ids) for before in parts[:n]) for n in range(count)]
    sampled = [part.sampled_rows + first for part, first in zip(parts, firsts, strict=True)]
    assert torch.cat(sampled).equal(batch.sampled_rows)
    assert [r for part in parts for r in part.sampled_requests] == batch.sampled_requests
    assert [len(part.sampled_requests) for part in parts] == [len(rows) for rows in sampled]
    wanted = [
        part.states.rows + first
        for part, first in zip(parts, firsts, strict=True)
        if part.states is not None
    ]
    assert torch.cat(wanted).equal(states.rows)


def test_what_else_goes_to_the_device_does_so_once(batch: Batch) -> None:
    cargo = Cargo([])
    parts = in_parts(replace(batch, cargo=cargo), 3)
    assert [part.cargo for part in parts] == [None, None, cargo]


@pytest.mark.parametrize("num_rows", [1, 7, 8, 15, 16, 17, 34, 100])
def test_parts_are_neither_small_nor_large(num_rows: int) -> None:
    assert num_parts(num_rows, 1, 8) == 1
    assert largest_part(num_rows, 1, 8) == num_rows
    count = num_parts(num_rows, 2, 8)
    assert count == 1 or num_rows // count >= 8
    assert -(-num_rows // count) <= largest_part(num_rows, 2, 8) <= 15
