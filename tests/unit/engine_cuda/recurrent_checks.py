"""What the kernels of layers with a state have to give, on any device, as `checks.py`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pdserve import _native
from pdserve.engine.attention import AttentionBatch
from pdserve.engine.cuda.layers.recurrent import RecurrentLayers
from pdserve.engine.layers import Mlp
from pdserve.engine.models.parameters import LayerWeights
from pdserve.engine.models.recurrent import RecurrentShape
from pdserve.engine.steps.batch import StateTables

SHAPE = RecurrentShape(1, 2, 5, 6, 3, frozenset({0}))
BLOCK_FLOATS = 100
STATE_BLOCKS = -(-SHAPE.state_bytes // 4 // BLOCK_FLOATS)


class Layer:
    """One layer with random weights, over a pool of states; as many rows as a check wants."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        made = torch.Generator().manual_seed(0)
        self.device = device
        self.rows = torch.randn(num_rows, SHAPE.input_width, generator=made)
        taps = SHAPE.num_groups, SHAPE.kernel, SHAPE.group_channels
        self.taps = torch.randn(taps, generator=made)
        norms = {
            name: torch.randn(size, generator=made)
            for name, size in (("decay", 2), ("decay_bias", 2), ("value_norm", SHAPE.value_dim))
        }
        # Of one group, files have the channels in the same order.
        norms["convolution"] = self.taps[0].T[:, None].contiguous()
        self.norms = norms
        there = {name: norm.to(device) for name, norm in norms.items()}
        nothing = Mlp(None, None)  # type: ignore[arg-type]
        self.weights = LayerWeights(there, None, {}, nothing, {})
        self.layers = RecurrentLayers(SHAPE, 1e-6, [self.weights])
        self.pool = torch.full((12 * STATE_BLOCKS, BLOCK_FLOATS), torch.nan, device=device)

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
        after = torch.full((len(own),), kept[1], dtype=torch.int32)
        tables = tables.int().transpose(0, 1).contiguous()
        starts, lengths, tables, after, rows = (
            each.to(self.device) for each in (starts, lengths.int(), tables, after, rows)
        )
        batch = AttentionBatch(starts, lengths, nothing, nothing)
        where = StateTables(tables, after)
        return self.layers.mix(0, self.weights, rows, batch, where, self.pool).cpu()

    def on_cpu(self, number: int, first: int, end: int) -> Tensor:
        """The same for one request, whose rows are those of its tokens."""
        norms, state = self.norms, self.state(number)
        out = torch.empty(end - first, SHAPE.values_width)
        _native.gated_delta(
            self.rows[first:end], self.taps, norms["decay"], norms["decay_bias"],
            norms["value_norm"], 1, SHAPE.key_dim, first, state, out,
        )  # fmt: skip
        content = self.pool[self.blocks(number)].flatten()
        content[: len(state)] = state.to(self.device)
        self.pool[self.blocks(number)] = content.view(STATE_BLOCKS, -1)
        return out

    def state(self, number: int) -> Tensor:
        """A copy of all its numbers."""
        return self.pool[self.blocks(number)].flatten()[: SHAPE.state_bytes // 4].clone().cpu()


def check_cpus_and_gpus_go_on_with_what_the_other_has_left(device: torch.device) -> None:
    """At any token of a chunk, whose tokens CPUs keep beside the matrices."""
    layer = Layer(26, device)
    expected = layer.on_cpu(0, 0, 26)
    for begins_on_gpu in (False, True):
        found, number = [], 1 + begins_on_gpu
        for index, (first, end) in enumerate(pairwise([0, 5, 9, 20, 26])):
            if index % 2 == begins_on_gpu:
                found.append(layer.on_cpu(number, first, end))
            else:
                found.append(layer.on_gpu([(number, first, first, end)]))
        torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=1e-4)


def check_bits_depend_on_no_batch_and_no_chunk(device: torch.device) -> None:
    layer = Layer(14, device)
    whole = layer.on_gpu([(0, 0, 0, 14)])
    layer.on_gpu([(1, 0, 0, 6), (2, 0, 3, 5)])
    *_, last = layer.on_gpu([(2, 2, 5, 6), (1, 6, 6, 14)])
    assert torch.equal(last, whole[-1])
    assert torch.equal(layer.state(0), layer.state(1))


def check_a_state_is_kept_behind_any_row(device: torch.device) -> None:
    """A snapshot; another request goes on with a copy of it, and leaves it as it is."""
    layer = Layer(14, device)
    layer.on_gpu([(0, 0, 0, 14)], kept=(1, 6))
    kept = layer.state(1)
    layer.on_gpu([(2, 6, 6, 14)], source=1)
    assert torch.equal(layer.state(2), layer.state(0))
    assert torch.equal(layer.state(1), kept)
