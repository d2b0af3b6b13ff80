"""What a step costs on a GPU, as exact counts: launches of our kernels and of torch's operations,
copies up and down, and waits.

Views and new tensors are launches of nothing, and are not counted. A count that has gone up says
what has come into the step; one that has gone down is to be written down here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from triton.runtime.interpreter import GridExecutor

from pdserve.engine.grammar import GrammarProgress, TokenMasks
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.config import load_model_config
from pdserve.engine.request import Request, Scheduled
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.checkpoints import make_checkpoint
from tests.fakes.graphs import Recorded, Replayed
from tests.fakes.late_copies import PromptCopies
from tests.matrix import matrix
from tests.plain_batch import build_batch
from tests.requests import make_request
from tests.unit.engine_cuda.compilations import compilations
from tests.unit.engine_cuda.decoders import make_node, random_weights
from tests.unit.engine_model.harness import Node, make_prompt

pytestmark = pytest.mark.usefixtures("interpreted")
NO_LAUNCH = {
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.detach.default",
    "aten.lift_fresh.default",
}


class Launches(TorchDispatchMode):
    """Counts what would be launched: operations that are no view, and our kernels by their names.

    What the interpreter itself asks of torch is not counted, nor what is done to pinned memory:
    that is the host's. What reads a tensor's numbers would be a wait, and is counted by its name.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, copies: PromptCopies, *, sees_nodes: bool
    ) -> None:
        """`sees_nodes`: a graph counts as what it consists of, and not as one replay."""
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._copies = copies
        self._is_inside = False  # of what is counted as one
        self._count(monkeypatch, GridExecutor, "__call__", lambda call: call.fn.__name__)
        if not sees_nodes:
            self._count(monkeypatch, Replayed, "replay", lambda _: "replay")
        for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__"):
            self._count(monkeypatch, torch.Tensor, name, lambda _, name=name: name)

    def _count(
        self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, named: Callable[[Any], str]
    ) -> None:
        run = getattr(owner, name)

        def counted(instance: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return run(instance, *args, **kwargs)
            self.counts[named(instance)] += 1
            self._is_inside = True
            result = run(instance, *args, **kwargs)
            self._is_inside = False
            return result

        monkeypatch.setattr(owner, name, counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_launch = not (self._is_inside or func.is_view or str(func) in NO_LAUNCH)
        if is_launch and not self._copies.is_pinned(args[0] if args else None):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def cuda_node(
    path: Path,
    num_layers: int,
    copies: PromptCopies,
    family: str = "qwen3",
    *,
    has_graphs: bool,
    pieces: tuple[int, ...] = (),
    buckets: tuple[int, ...] = (1, 4),
    most_draws: int = 256,
    tap_layers: tuple[int, ...] = (),
) -> Node:
    from pdserve.engine.cuda.attention.triton_attention import TritonAttention
    from pdserve.engine.cuda.copies.staging import Staging
    from pdserve.engine.cuda.decoder import CudaDecoder

    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    checkpoint = make_checkpoint(path, family, num_hidden_layers=num_layers, **sizes)
    config = load_model_config(resolve_checkpoint(str(checkpoint)))
    weights = random_weights(config, torch.float32, torch.device("cpu"))
    recorder = Recorded() if has_graphs else None
    return make_node(
        CudaDecoder(
            config,
            weights,
            TritonAttention(),
            Staging(copies),
            recorder,
            buckets,
            piece_sizes=pieces,
            most_draws=most_draws,
            tap_layers=tap_layers,
        )
    )


def launches_of_a_layer(
    tmp_path: Path,
    num_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_graphs: bool,
    family: str = "qwen3",
) -> Counter[str]:
    """Of one request's step: what a model of two layers launches, less what one of one does."""
    totals = []
    for num_layers in (1, 2):
        copies, folder = PromptCopies(), tmp_path / str(num_layers)
        node = cuda_node(folder, num_layers, copies, family, has_graphs=has_graphs)
        request = make_request(make_prompt(6))
        node.step([Scheduled(request, 6)])  # captures graphs, if there are any
        if num_tokens > 1:
            request = make_request(make_prompt(num_tokens))
        with monkeypatch.context() as patch, Launches(patch, copies, sees_nodes=True) as launches:
            node.step([Scheduled(request, num_tokens)])
        totals.append(launches.counts)
    assert not totals[0] - totals[1], "another layer saves nothing"
    return totals[1] - totals[0]


TOKENWISE = {
    "add_rms_norm_rows": 2,
    "aten.linear.default": 4,  # qkv, attention's output, gate and up, down
    "rotate_and_write_heads": 1,
    "activate_and_multiply_rows": 1,
}
OF_DECODES = {"attend_single_rows": 1, "merge_splits": 1}
OF_PROMPTS = {"attend_chunks": 1}
EXPERTS = {  # what another layer has if it has experts
    "aten.linear.default": 3,  # qkv, attention's output, router
    "aten.sort.stable": 2,  # of experts by score, of rows by expert
    "aten.logsumexp.default": 1,
    "aten.sub.Tensor": 1,
    "aten.exp.default": 1,
    "aten.arange.default": 1,
    "aten.scatter_.src": 1,
    "aten.searchsorted.Tensor": 1,
    "multiply_experts": 2,
    "add_up_experts": 1,
}


@pytest.mark.long  # a whole step is by default
def test_a_layer_of_a_decode_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph: these are its nodes."""
    found = launches_of_a_layer(tmp_path, 1, monkeypatch, has_graphs=True)
    assert found == {**TOKENWISE, **OF_DECODES}


@pytest.mark.long  # they are compiled beforehand by default
def test_a_layer_with_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = launches_of_a_layer(tmp_path, 1, monkeypatch, has_graphs=True, family="qwen3_moe")
    assert found == {**TOKENWISE, **OF_DECODES, **EXPERTS}


@pytest.mark.long  # a whole step is by default
@pytest.mark.parametrize(("num_tokens", "attention"), matrix([(1, OF_DECODES), (5, OF_PROMPTS)], 1))
def test_a_layer_of_a_step_without_a_graph(
    tmp_path: Path, num_tokens: int, attention: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is launched for a kind of rows that the step does not have."""
    found = launches_of_a_layer(tmp_path, num_tokens, monkeypatch, has_graphs=False)
    assert found == {**TOKENWISE, **attention}


def launches_of_a_mixed_step(
    node: Node, copies: PromptCopies, monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    """Of one that decodes beside a prompt, without sampling."""
    decoding, prompt = make_request(make_prompt(6)), make_request(make_prompt(5))
    node.step([Scheduled(decoding, 6), Scheduled(prompt, 2)])  # captures graphs
    rows = [Scheduled(decoding, 1), Scheduled(prompt, 3)]
    batch = build_batch(rows, node.kv_cache.layout.block_size, node.model.device)
    node.model.logits(batch, node.kv_cache.pool)  # pinned memory grows
    with monkeypatch.context() as patch, Launches(patch, copies, sees_nodes=False) as launches:
        node.model.logits(batch, node.kv_cache.pool)
    return launches.counts


@pytest.mark.long  # a whole step is by default
def test_a_layer_of_a_mixed_step_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are what the host has to do: they were eleven."""
    totals = []
    for num_layers in (1, 2):
        copies, folder = PromptCopies(), tmp_path / str(num_layers)
        node = cuda_node(folder, num_layers, copies, has_graphs=True, pieces=(8,))
        totals.append(launches_of_a_mixed_step(node, copies, monkeypatch))
    layer = {"replay": 1, **OF_PROMPTS, **OF_DECODES}
    assert totals[1] - totals[0] == layer


@pytest.mark.long  # test_pieces.py has it by default
def test_a_mixed_step_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside its layers: what it reads, and the logits of two rows."""
    copies = PromptCopies()
    node = cuda_node(tmp_path, 1, copies, has_graphs=True, pieces=(8,))
    layer = {"replay": 1, **OF_PROMPTS, **OF_DECODES}
    found = launches_of_a_mixed_step(node, copies, monkeypatch)
    assert found - Counter(layer) == {
        "aten.copy_.default": 1 + 3,  # of the batch to the GPU, and there to where pieces read it
        "replay": 1,  # before the first layer
        "aten.index.Tensor": 1,  # the rows that are sampled
        "add_rms_norm_rows": 1,
        "aten.linear.default": 1,
    }


# What is launched behind a graph, by what is asked for.
CHOOSE = {"choose_tokens": 1}
SAMPLINGS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "greedy": ({}, CHOOSE),
    "filters": ({"temperature": 1.0, "seed": 7, "top_k": 9, "top_p": 0.9, "min_p": 0.01}, CHOOSE),
    "logprobs": ({"logprobs": 5}, {**CHOOSE, "rank_logits": 1}),
    "allowed": ({"allowed_token_ids": [4, 5, 6]}, {**CHOOSE, "mask_rows": 1}),
    "grammar": ({"grammar": "the test's"}, {**CHOOSE, "mask_rows": 1}),
    "bias": ({"logit_bias": {3: 1.0}}, {**CHOOSE, "mask_rows": 1, "edit_rows": 1}),
    "penalties": (
        {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "min_tokens": 9},
        {**CHOOSE, "mask_rows": 1, "edit_rows": 3},
    ),
}


class EvenTokens(GrammarProgress):
    """Allows every second token, wherever there is a grammar."""

    def masks(self, requests: Sequence[Request]) -> TokenMasks | None:
        rows = [row for row, request in enumerate(requests) if request.sampling.grammar]
        bits = np.full((len(rows), 16), 0x55555555, np.int32)
        return TokenMasks(rows, bits) if rows else None


def test_a_decode_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy up, one graph, the sampling behind it, one copy down, and one wait for that."""
    copies = PromptCopies()
    node = cuda_node(tmp_path, 1, copies, has_graphs=True)
    node.runner = ModelRunner(node.model, node.kv_cache, grammars=EvenTokens())
    requests = {asked: make_request(make_prompt(3), **of) for asked, (of, _) in SAMPLINGS.items()}
    node.step([Scheduled(request, 3) for request in requests.values()])
    for request in requests.values():  # pinned memory grows
        node.step([Scheduled(request, 1)])
    for asked, (_, launched) in SAMPLINGS.items():
        copies.forget()
        with monkeypatch.context() as patch, Launches(patch, copies, sees_nodes=False) as launches:
            node.step([Scheduled(requests[asked], 1)])
        assert launches.counts == {"aten.copy_.default": 1, "replay": 1, **launched}, asked
        assert [len(copies.started), len(copies.fetched), copies.num_waits] == [1, 1, 1], asked


@pytest.mark.parametrize(
    "pieces", matrix([(one,) for one in [(), (8,)]], 1), ids=["launched", "pieces"]
)
def test_a_mixed_step_is_copied_and_waited_for_once_as_well(
    tmp_path: Path, pieces: tuple[int, ...]
) -> None:
    copies = PromptCopies()
    node = cuda_node(tmp_path, 1, copies, has_graphs=True, pieces=pieces)
    decoding, prompt = make_request(make_prompt(6)), make_request(make_prompt(5), logprobs=2)
    node.step([Scheduled(decoding, 6)])
    copies.forget()
    node.step([Scheduled(decoding, 1), Scheduled(prompt, 5)])
    assert [len(copies.started), len(copies.fetched), copies.num_waits] == [1, 1, 1]


@pytest.mark.long  # those of the sampler are by default
def test_experts_are_compiled_before_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For whatever number of rows: it alone makes tiles of other sizes."""
    from pdserve.engine.cuda.layers.experts import mix_experts
    from pdserve.engine.cuda.layers.rows import silu_mul

    node = cuda_node(tmp_path, 1, PromptCopies(), "qwen3_moe", has_graphs=False)
    with compilations(monkeypatch) as before:
        node.model.warm_up()
    layer = random_weights(node.model.config, torch.float32, torch.device("cpu")).layers[0].mlp
    tiles = set()
    for num_rows in (1, 43, 86):  # with 3 of 8 experts each: 1, 17 and 33 places an expert
        with compilations(monkeypatch) as found:
            mix_experts(torch.ones(num_rows, layer.gate_up.weight.shape[2]), layer, silu_mul)
        assert found <= before, num_rows
        tiles |= {dict(kept)["BLOCK_M"] for name, kept in found if name == "multiply_experts"}
    assert tiles == {16, 32, 64}
