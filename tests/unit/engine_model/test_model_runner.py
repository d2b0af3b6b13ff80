from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.request import Scheduled
from pdserve.shared.errors import NodeSick, UnusableLogits
from tests.cluster.prompts import EOS_TOKEN_ID
from tests.requests import make_request
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt


@pytest.fixture
def node(kind: DecoderKind, checkpoint_of: Callable[..., Path]) -> Node:
    return Node.load(checkpoint_of("llama"), kind, num_tokens=512)


def test_one_entry_per_row(node: Node) -> None:
    rows = [
        Scheduled(make_request(make_prompt(20)), 20),
        Scheduled(make_request(make_prompt(20)), 8),
        Scheduled(make_request(make_prompt(3)), 3),
    ]
    first, second, third = node.step(rows)
    assert first is not None
    assert second is None
    assert third is not None


def test_eos_ids_come_from_the_model(node: Node) -> None:
    bias = {EOS_TOKEN_ID: 100.0}
    willing = make_request(make_prompt(5), logit_bias=bias)
    held = make_request(make_prompt(5), logit_bias=bias, min_tokens=1)
    node.generate([willing, held], 2)
    assert willing.output_token_ids == [EOS_TOKEN_ID] * 2
    assert held.output_token_ids[0] != EOS_TOKEN_ID
    assert held.output_token_ids[1] == EOS_TOKEN_ID


def test_damaged_kv_is_blamed_on_its_request_and_the_others_go_on(node: Node) -> None:
    good, bad = (make_request(make_prompt(20), request_id=name) for name in ("good", "bad"))
    node.generate([good, bad], 1)
    node.kv_cache.pool[bad.block_table[0]] = float("nan")
    rows = [Scheduled(good, 1), Scheduled(bad, 1)]
    with pytest.raises(UnusableLogits, match="bad") as raised:
        node.runner.execute(rows)
    assert raised.value.request_ids == ["bad"]
    (token,) = node.runner.execute(rows[:1])
    alone = make_request(make_prompt(20))
    node.generate([alone], 2)
    assert token is not None
    assert token.token_id == alone.output_token_ids[1]


def test_warmup_leaves_the_model_as_it_was(node: Node) -> None:
    node.runner.warmup(100)
    fresh = ModelRunner(node.model, node.kv_cache)
    request = make_request(make_prompt(30))
    node.generate([request], 5)
    node.runner = fresh
    again = make_request(make_prompt(30))
    node.generate([again], 5)
    assert again.output_token_ids == request.output_token_ids


class Failing:
    """A decoder on a GPU that fails with kernels on their way."""

    device = torch.device("cuda", 1)
    most_ahead = 0

    def __init__(self, node: Node, error: Exception) -> None:
        self.config, self.dtype = node.model.config, node.model.dtype
        self.sampler = node.model.sampler
        self._error = error

    def logits(self, *_: object) -> NoReturn:
        raise self._error


@pytest.mark.parametrize(
    ("error", "num_waits"),
    [(torch.OutOfMemoryError("no room"), 1), (NodeSick("a rank has ended"), 0)],
    ids=["out of memory", "rank lost"],
)
def test_the_gpu_is_done_with_the_blocks_of_a_step_that_failed(
    node: Node, monkeypatch: pytest.MonkeyPatch, error: Exception, num_waits: int
) -> None:
    """Unless it waits for a rank that has ended, when the node ends too."""
    waited: list[torch.device] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(Failing.device))
    monkeypatch.setattr(torch.cuda, "current_stream", {Failing.device: stream}.__getitem__)
    runner = ModelRunner(Failing(node, error), node.kv_cache)  # type: ignore[arg-type]
    request = make_request(make_prompt(5), block_table=[0])
    with pytest.raises(type(error), match=str(error)):
        runner.execute([Scheduled(request, 5)])
    assert len(waited) == num_waits
