"""What a runner reports while a step runs: layers whose KV is written, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import Scheduled
from tests.requests import make_request
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt

NUM_LAYERS = 4


@pytest.mark.parametrize("ends", [[1, 2, 3, 4], [2], [1, 3]])
def test_a_layer_is_reported_when_its_kv_is_written(
    checkpoint_of: Callable[..., Path], kind: DecoderKind, ends: list[int]
) -> None:
    path = checkpoint_of("llama", num_hidden_layers=NUM_LAYERS)
    node = Node.load(path, kind, num_tokens=512)
    requests = [make_request(make_prompt(20, seed)) for seed in (1, 2)]
    for request in requests:
        request.block_table = [node.free.pop() for _ in range(2)]
    blocks = [block for request in requests for block in request.block_table]
    written: list[tuple[int, torch.Tensor]] = []

    def done(num_layers: int) -> None:
        # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], of NaN until written
        written.append((num_layers, node.kv_cache.pool[blocks].clone()))

    node.runner.execute([Scheduled(request, 20) for request in requests], LayerProgress(ends, done))
    after = node.kv_cache.pool[blocks]
    assert [num_layers for num_layers, _ in written] == ends
    for num_layers, then in written:
        assert torch.equal(then[:, :num_layers].nan_to_num(), after[:, :num_layers].nan_to_num())
        assert not then[0, :num_layers].isnan().any()  # the first block is full
        assert then[:, num_layers:].isnan().all()


def test_the_tokens_are_the_same_whether_somebody_listens_or_not(
    checkpoint_of: Callable[..., Path], kind: DecoderKind
) -> None:
    node = Node.load(checkpoint_of("llama"), kind, num_tokens=512)
    sampled = []
    for progress in (None, LayerProgress([1], lambda _: None)):
        request = make_request(make_prompt(30))
        request.block_table = [node.free.pop() for _ in range(2)]
        sampled.append(node.runner.execute([Scheduled(request, 30)], progress))
    assert sampled[0] == sampled[1]
