"""What a step costs in calls, as exact counts: native entries, and torch's operations.

A count that has gone up says what has come into the step; one that has gone down is to be written
down here.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from pdserve import _native
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.decoder import Decoder
from tests.requests import make_request
from tests.unit.engine_model.harness import Node, make_prompt
from tests.unit.engine_model.small_models import SmallModel, small_model


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do; views, which touch no data, too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class NativeDecoderCalls:
    """Around the native decoder: its steps are native entries as well."""

    def __init__(self, decoder: Any, calls: Counter[str]) -> None:
        self._decoder = decoder
        self._calls = calls

    def logits(self, *arguments: Any, **named: Any) -> None:
        self._calls["Decoder.logits"] += 1
        self._decoder.logits(*arguments, **named)


def node_of(small: SmallModel, model: Decoder) -> Node:
    kv_cache = small.kv_cache()
    return Node(model, kv_cache, ModelRunner(model, kv_cache), list(range(64)))


def decode_step(node: Node, num_rows: int) -> Counter[str]:
    """Operations of one step, after those that make it usual."""
    requests = [
        make_request(make_prompt(5, seed), request_id=f"{seed}") for seed in range(num_rows)
    ]
    node.generate(requests, 3)
    with Operations() as operations:
        node.generate(requests, 4)
    return operations.counts


def count_native(node: Node, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    calls: Counter[str] = Counter()

    def counted(name: str) -> None:
        function = getattr(_native, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(_native, name, call)

    for name in dir(_native):
        if type(getattr(_native, name)).__name__ == "nb_func":
            counted(name)
    decoder: Any = node.model
    monkeypatch.setattr(decoder, "_decoder", NativeDecoderCalls(decoder._decoder, calls))
    return calls


@pytest.mark.parametrize(("num_layers", "num_rows"), [(1, 1), (3, 1), (2, 9)])
def test_a_step_on_a_cpu_is_two_native_calls(
    num_layers: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = small_model(num_hidden_layers=num_layers)
    node = node_of(small, small.native())
    calls = count_native(node, monkeypatch)
    node.generate([make_request(make_prompt(5, seed)) for seed in range(num_rows)], 4)
    assert calls == {"Decoder.logits": 4, "sample": 4}


def test_torch_does_as_much_for_a_native_step_whatever_its_size() -> None:
    found = []
    for num_layers, num_rows in [(1, 1), (3, 1), (2, 9)]:
        small = small_model(num_hidden_layers=num_layers)
        found.append(decode_step(node_of(small, small.native()), num_rows))
    assert found[0] == found[1] == found[2]
    assert found[0] == {"aten.slice.Tensor": 1}, "the rows of the logits that are kept"


def test_operations_of_a_layer_in_torch() -> None:
    """Of the decoder for devices without kernels of ours; attention itself is native here."""
    totals = []
    for num_layers in (2, 3):
        small = small_model(num_hidden_layers=num_layers)
        totals.append(decode_step(node_of(small, small.torch()), 3))
    layer = totals[1] - totals[0]
    assert layer["aten.linear.default"] == 4, "qkv, attention's output, gate and up, down"
    assert layer.total() == 48, layer
