"""Snapshots of states: what goes on behind one is as if all had been computed, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.engine.core import EngineCore
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues
from pdserve.shared.clock import ManualClock
from tests.fakes.runner import decode_policy
from tests.requests import make_request
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt

BLOCK = 4
NUM_BLOCKS = 1500


class Served:
    """A model under an engine core, without a node."""

    def __init__(self, path: Path, kind: DecoderKind, chunk: int, *, keeps: bool = True) -> None:
        self.node = Node.load(path, kind, block_size=BLOCK, num_tokens=NUM_BLOCKS * BLOCK)
        states = self.node.kv_cache.layout.state_blocks
        self.pool = BlockPool(NUM_BLOCKS, BLOCK, prefix_cache=keeps, state_blocks=states)
        queues = Queues(self.pool, ManualClock())
        self.core = EngineCore(queues, decode_policy(chunk, 8), frozenset())

    def run(self, *requests: Request, until: int = 10**6) -> list[bytes]:
        """Each one's state, as it ends; leaves off after so many steps."""
        ends: dict[Request, bytes] = {}
        for request in requests:
            if self.core.find(request.request_id) is None:
                self.core.submit(request)
        for _ in range(until):
            rows = self.core.begin_step()
            if not rows:
                break
            sampled = self.node.runner.execute(rows)
            for request in self.core.end_step(rows, sampled, 0.0):
                ends[request] = self.state_of(request)
                self.core.forget(request)
        return [ends[request] for request in requests if request in ends]

    def state_of(self, request: Request) -> bytes:
        cache = self.node.kv_cache
        blocks = cache.pool.view(torch.uint8).view(cache.num_blocks, -1)
        return blocks[request.state_blocks].numpy().tobytes()[: cache.layout.state_bytes]


@pytest.fixture(scope="module")
def path(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("qwen3_next", num_hidden_layers=2)


def conversation() -> list[list[int]]:
    """Prompts: one that the next begins with, and two that part from it, at the same place."""
    first = make_prompt(50)
    return [first, [*first, *make_prompt(21, 1)], [*first[:30], 7, 8, 9], [*first[:30], 1, 2, 3]]


@pytest.mark.parametrize("chunk", [1000, 7])
def test_going_on_behind_a_snapshot_changes_no_bit(path: Path, chunk: int) -> None:
    plain = Served(path, DecoderKind.SERVED, chunk, keeps=False)
    served = Served(path, DecoderKind.SERVED, chunk)
    cached = []
    for prompt in conversation():
        expected, request = (make_request(prompt, max_tokens=20) for _ in range(2))
        assert served.run(request) == plain.run(expected)
        assert request.output_token_ids == expected.output_token_ids
        cached.append(request.num_cached_tokens)
        served.pool.check_integrity()
    # The end of the first prompt; none, since the next one parts before it; and where that parted.
    assert cached == [0, 48, 0, 28]


def test_torch_goes_on_behind_one(path: Path) -> None:
    served = Served(path, DecoderKind.TORCH, 1000)
    outputs = []
    for _ in range(2):
        request = make_request(make_prompt(30), max_tokens=8)
        served.run(request)
        outputs.append(request.output_token_ids)
    assert request.num_cached_tokens == 28
    assert outputs[0] == outputs[1]


def test_one_that_is_a_token_late_says_something_else(path: Path) -> None:
    served = Served(path, DecoderKind.SERVED, 1000)
    prompt = make_prompt(50)
    first, again = (make_request(prompt, max_tokens=8) for _ in range(2))
    right = served.run(first)
    served.core.submit(again)
    (row,) = served.core.begin_step()
    again.num_computed_tokens -= 1
    late = [row._replace(num_tokens=row.num_tokens + 1)]
    served.core.end_step(late, served.node.runner.execute(late), 0.0)
    assert served.run(again) != right


def test_a_preempted_stream_goes_on_behind_its_last(path: Path) -> None:
    served = Served(path, DecoderKind.SERVED, 1000)
    alone = make_request(make_prompt(10), max_tokens=150)
    plain = Served(path, DecoderKind.SERVED, 1000, keeps=False)
    expected = plain.run(alone)
    request = make_request(make_prompt(10), max_tokens=150)
    served.run(request, until=140)  # behind two of an answer, of which the second stays
    served.core.queues.preempt(request)
    assert len(served.pool.snapshots or ()) == 2
    rows = served.core.begin_step()
    assert request.num_computed_tokens == 128
    served.core.abandon_step(rows, [], was_computed=False)
    assert served.run(request) == expected
