"""Layers with a state on a GPU, against what CPUs compute, and behind what they have left."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pdserve import _native
from pdserve.engine.attention import AttentionBatch
from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.layers import Mlp
from pdserve.engine.models.config import load_model_config
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.models.parameters import LayerWeights
from pdserve.engine.models.recurrent import RecurrentShape
from pdserve.engine.models.torch_decoder import TorchDecoder
from pdserve.engine.plan.forms import FLOAT32, ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.steps.batch import StateTables
from pdserve.engine.weights.load import load_torch_weights
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.checkpoints import make_checkpoint
from tests.fakes.late_copies import PromptCopies
from tests.requests import make_request
from tests.unit.engine_cuda.decoders import make_node
from tests.unit.engine_model.harness import make_prompt

pytestmark = pytest.mark.usefixtures("interpreted")

CPU = torch.device("cpu")
SHAPE = RecurrentShape(1, 2, 5, 6, 3, frozenset({0}))
BLOCK_FLOATS = 100
STATE_BLOCKS = -(-SHAPE.state_bytes // 4 // BLOCK_FLOATS)


class Layer:
    """One layer with random weights, over a pool of states; as many rows as a test wants."""

    def __init__(self, num_rows: int) -> None:
        from pdserve.engine.cuda.layers.recurrent import RecurrentLayers

        made = torch.Generator().manual_seed(0)
        self.rows = torch.randn(num_rows, SHAPE.input_width, generator=made)
        self.taps = torch.randn(SHAPE.num_groups, SHAPE.kernel, SHAPE.group_channels)
        norms = {
            name: torch.randn(size, generator=made)
            for name, size in (("decay", 2), ("decay_bias", 2), ("value_norm", SHAPE.value_dim))
        }
        # Of one group, files have the channels in the same order.
        norms["convolution"] = self.taps[0].T[:, None].contiguous()
        linear = Mlp(None, None)  # type: ignore[arg-type]
        self.weights = LayerWeights(norms, None, {}, linear, {})
        self.layers = RecurrentLayers(SHAPE, 1e-6, [self.weights])
        self.pool = torch.full((12 * STATE_BLOCKS, BLOCK_FLOATS), torch.nan)

    def blocks(self, number: int) -> list[int]:
        """Of a state; they do not follow each other."""
        return list(range(number, len(self.pool), 12))

    def on_gpu(
        self,
        requests: Sequence[tuple[int, int, int, int]],
        kept: tuple[int, int] = (0, 0),
        source: int | None = None,
    ) -> Tensor:
        """A step. Requests are (number of its state, tokens before, first row, end)."""
        own = [self.blocks(number) for number, *_ in requests]
        before = own if source is None else [self.blocks(source)]
        tables = torch.tensor([own, before, [self.blocks(kept[0])] * len(own)])
        sizes = torch.tensor([end - first for _, _, first, end in requests])
        starts = torch.cat([torch.zeros(1), sizes.cumsum(0)]).int()
        lengths = torch.tensor([number for _, number, *_ in requests]) + sizes
        rows = torch.cat([self.rows[first:end] for *_, first, end in requests])
        nothing = torch.empty(0, dtype=torch.int64)
        return self.layers.mix(
            0,
            self.weights,
            rows,
            AttentionBatch(starts, lengths.int(), nothing, nothing),
            StateTables(
                tables.int().transpose(0, 1).contiguous(),
                torch.full((len(own),), kept[1], dtype=torch.int32),
            ),
            self.pool,
        )

    def on_cpu(self, number: int, first: int, end: int) -> Tensor:
        """The same for one request, whose rows are those of its tokens."""
        norms = self.weights.norms
        state = self.state(number).clone()
        out = torch.empty(end - first, SHAPE.values_width)
        _native.gated_delta(
            self.rows[first:end], self.taps, norms["decay"], norms["decay_bias"],
            norms["value_norm"], 1, SHAPE.key_dim, first, state, out,
        )  # fmt: skip
        content = self.pool[self.blocks(number)].flatten()
        content[: len(state)] = state
        self.pool[self.blocks(number)] = content.view(STATE_BLOCKS, -1)
        return out

    def state(self, number: int) -> Tensor:
        """All its numbers."""
        return self.pool[self.blocks(number)].flatten()[: SHAPE.state_bytes // 4]


def test_cpus_and_gpus_go_on_with_what_the_other_has_left(interpreted: None) -> None:
    """At any token of a chunk, whose tokens CPUs keep beside the matrices."""
    layer = Layer(40)
    expected = layer.on_cpu(0, 0, 40)
    for begins_on_gpu in (False, True):
        found, number = [], 1 + begins_on_gpu
        for index, (first, end) in enumerate(pairwise([0, 5, 9, 21, 32, 40])):
            if index % 2 == begins_on_gpu:
                found.append(layer.on_cpu(number, first, end))
            else:
                found.append(layer.on_gpu([(number, first, first, end)]))
        torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=1e-4)


def test_bits_depend_on_no_batch_and_no_chunk(interpreted: None) -> None:
    layer = Layer(14)
    whole = layer.on_gpu([(0, 0, 0, 14)])
    layer.on_gpu([(1, 0, 0, 6), (2, 0, 3, 5)])
    *_, last = layer.on_gpu([(2, 2, 5, 6), (1, 6, 6, 14)])
    assert torch.equal(last, whole[-1])
    assert torch.equal(layer.state(0), layer.state(1))


def test_a_state_is_kept_behind_any_row(interpreted: None) -> None:
    """A snapshot; another request goes on with a copy of it, and leaves it as it is."""
    layer = Layer(14)
    layer.on_gpu([(0, 0, 0, 14)], kept=(1, 6))
    kept = layer.state(1).clone()
    layer.on_gpu([(2, 6, 6, 14)], source=1)
    assert torch.equal(layer.state(2), layer.state(0))
    assert torch.equal(layer.state(1), kept)


def test_a_model_has_the_tokens_of_the_torch_decoder(interpreted: None, tmp_path: Path) -> None:
    """Behind a layer with a state there is one with attention, which is gated."""
    from pdserve.engine.cuda.attention.triton_attention import TritonAttention
    from pdserve.engine.cuda.copies.staging import Staging
    from pdserve.engine.cuda.decoder import CudaDecoder

    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "num_attention_heads": 2}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 1}
    sizes = {"num_hidden_layers": 2, **heads, **experts}
    checkpoint = resolve_checkpoint(str(make_checkpoint(tmp_path, "qwen3_next", **sizes)))
    config = load_model_config(checkpoint)
    plan = ModelPlan.of(config, form=FLOAT32)
    weights = load_torch_weights(checkpoint, plan, ActivationDtype.FLOAT32, CPU)
    models: list[Decoder] = [
        TorchDecoder(config, weights, ReferenceAttention()),
        CudaDecoder(config, weights, TritonAttention(), Staging(PromptCopies()), None),
    ]
    outputs = []
    for model in models:
        batch = [make_request(make_prompt(n, seed=n)) for n in (1, 5)]
        make_node(model).generate(batch, 2, chunk=4)
        outputs.append([request.output_token_ids for request in batch])
    assert outputs[0] == outputs[1]
