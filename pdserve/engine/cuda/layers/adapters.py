"""Adapters on a GPU: what they add to the products of a step's rows, as segmented products.

Rows are brought together by adapter, in tiles; a table of each matrix says where the adapters' A
and B are. So any mix of adapters is two launches a matrix, and the sums of a row have one order,
whatever rows are beside it. Steps without adapters launch none of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Final

import torch
import triton
from torch import Tensor

from pdserve.engine.adapters.adapter import Adapter, LowRank
from pdserve.engine.adapters.torch_rows import Rows
from pdserve.engine.cuda.copies.staging import Staging
from pdserve.engine.cuda.layers.adapter_kernels import expand_rows, shrink_rows
from pdserve.engine.experts import Experts, SharedExpert
from pdserve.engine.layers import Linear, Mlp
from pdserve.engine.models.parameters import DecoderWeights, LayerWeights
from pdserve.engine.plan.layer import LayerPlan
from pdserve.engine.plan.matrix import Matrices, Matrix, Part
from pdserve.engine.plan.model import ModelPlan
from pdserve.shared.errors import AdapterRefused

_TILE: Final = 16  # rows of one adapter; also ranks, of which each has a multiple
_FIELDS: Final = 5  # of a row of a table: see adapter_kernels.py
_SLOTS: Final = 8  # that tables have at first
_NOTHING: Final = [0] * _FIELDS


@dataclass(frozen=True, slots=True)
class DeviceAddition:
    """What an adapter adds to the products of one matrix."""

    a: Tensor  # [ranks of all parts, in_features], of the products' inputs' dtype
    b: Tensor  # [out_features, ranks], likewise; zeros where a part has not these ranks
    bias: Tensor | None  # [out_features] float32
    factors: Tensor | None  # [out_features] float32

    @property
    def entry(self) -> list[int]:
        """Its row of the matrix's table."""
        tensors = (self.a, self.b, self.bias, self.factors)
        return [0 if each is None else each.data_ptr() for each in tensors] + [len(self.a)]


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The rows of a step, or of a part of one, on the GPU."""

    tables: Tensor  # [num_matrices, num_slots, _FIELDS] int64
    rows: Tensor  # [num_tiles * _TILE] int32; -1 fills up
    slots: Tensor  # [num_tiles] int32


class DeviceAdapters:
    """All that a decoder has. Steps come from one thread; others may take and drop meanwhile."""

    def __init__(self, plan: ModelPlan, weights: DecoderWeights) -> None:
        """`plan` and `weights` are of one rank."""
        self._plan = plan
        self._dtype, self._device = weights.embedding.dtype, weights.embedding.device
        self._matrices: list[Matrix] = []
        self._linears: list[Linear] = []  # likewise
        layers = map(self._layer, weights.layers, plan.layers)
        self.weights = replace(weights, layers=list(layers))  # that add what adapters do
        shape = len(self._matrices), _SLOTS, _FIELDS
        self._tables = torch.zeros(shape, dtype=torch.int64, device=self._device)
        self._slots: dict[str, int] = {}  # by digest
        self._owners: dict[str, list[DeviceAddition]] = {}  # of what tables point to, likewise
        self._most_ranks = _TILE
        self._tiles: _Tiles | None = None  # of the step that is being launched

    def take(self, adapter: Adapter) -> Adapter:
        """Put an adapter on the GPU; return it with what it does to the vocabulary there.

        Raises:
            AdapterRefused: it adapts single experts, or heads of latent attention.
        """
        own = {part.name for layer in self._plan.layers for part in _parts_of_stacks(layer)}
        if adapted := sorted(own & adapter.parts.keys()):
            raise AdapterRefused(
                f"{adapted[0]}: experts, and heads of latent attention, are not adapted on GPUs, "
                "what else attention has, routers and shared experts are; serve it on CPU nodes"
            )
        made = list(map(partial(self._addition, adapter), self._matrices, self._linears))
        free = set(range(len(self._slots) + 1)) - {*self._slots.values()}
        slot = min(free)
        tables = self._tables
        if slot == tables.shape[1]:
            tables = torch.cat([tables, torch.zeros_like(tables)], dim=1)
        entries = [_NOTHING if each is None else each.entry for each in made]
        tables[:, slot] = torch.tensor(entries, dtype=torch.int64).to(self._device)
        if not self._slots:
            self._warm_up()
        self._owners[adapter.digest] = [each for each in made if each is not None]
        self._most_ranks = max([self._most_ranks, *(entry[-1] for entry in entries)])
        self._tables, self._slots[adapter.digest] = tables, slot
        return self._vocabulary(adapter)

    def drop(self, digest: str) -> None:
        """Forget one that no step has."""
        del self._slots[digest], self._owners[digest]

    @contextmanager
    def computing(self, rows: Rows, staging: Staging) -> Iterator[None]:
        """Launch with these rows of these adapters while the context lasts."""
        numbers, slots = [], []
        for adapter, own in rows:
            fill = -len(own) % _TILE
            numbers += [*own.tolist(), *[-1] * fill]
            slots += [self._slots[adapter.digest]] * ((len(own) + fill) // _TILE)
        on_host = [torch.tensor(some, dtype=torch.int32) for some in (numbers, slots)]
        self._tiles = _Tiles(self._tables, *staging.send(on_host))
        try:
            yield
        finally:
            self._tiles = None

    def add(self, index: int, x: Tensor, y: Tensor, bias: Tensor | None) -> None:
        """Add to y, the product of matrix `index` with x, what the step's adapters do.

        Args:
            index: of the matrix.
            x: [num_rows, in_features], contiguous.
            y: [num_rows, out_features], contiguous.
            bias: [out_features], the model's, which is in y already.
        """
        tiles = self._tiles
        assert tiles is not None, "these weights are for `computing`"
        add_low_rank(tiles.tables[index], tiles.rows, tiles.slots, self._most_ranks, x, y, bias)

    # ---- parts ---------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Launch what steps launch, for no rows, so that no request compiles it."""
        with torch.cuda.device_of(self.weights.embedding):  # type: ignore[no-untyped-call]
            rows = torch.full((_TILE,), -1, dtype=torch.int32, device=self._device)
            for table, matrix, linear in zip(
                self._tables, self._matrices, self._linears, strict=True
            ):
                x, y = (
                    torch.zeros(1, size, dtype=self._dtype_of(linear), device=self._device)
                    for size in (matrix.num_in, matrix.num_out)
                )
                add_low_rank(table, rows, rows[:1] + 1, self._most_ranks, x, y, linear.bias)

    def _dtype_of(self, linear: Linear) -> torch.dtype:
        """Return that of what a matrix takes."""
        is_wide = linear.weight.dtype == torch.float32  # a router's
        return torch.float32 if is_wide else self._dtype

    def _layer(self, weights: LayerWeights, plan: LayerPlan) -> LayerWeights:
        matrices, mlp = plan.mlp.matrices, weights.mlp
        mixer = {name: self._linear(one, plan.mixer[name]) for name, one in weights.mixer.items()}
        if isinstance(mlp, Mlp):
            return replace(weights, mixer=mixer, mlp=self._mlp(mlp, matrices, ""))
        shared = mlp.shared
        if shared is not None:
            weighs = shared.weight and self._linear(shared.weight, matrices["shared_weight"])
            shared = SharedExpert(self._mlp(shared.mlp, matrices, "shared_"), weighs)
        router = self._linear(mlp.router, matrices["router"])
        experts = Experts(mlp.config, router, mlp.gate_up, mlp.down, shared, mlp.score_bias)
        return replace(weights, mixer=mixer, mlp=experts)

    def _mlp(self, mlp: Mlp, matrices: Matrices, kind: str) -> Mlp:
        own = {name: self._linear(one, matrices[kind + name]) for name, one in mlp.linears.items()}
        return Mlp(**own)

    def _linear(self, linear: Linear, matrix: Matrix) -> Linear:
        self._matrices.append(matrix)
        self._linears.append(linear)
        index = len(self._linears) - 1
        return SegmentedLinear(linear.weight, linear.bias, linear.scales, linear, self, index)

    def _addition(self, adapter: Adapter, matrix: Matrix, linear: Linear) -> DeviceAddition | None:
        own = list(adapter.of(matrix, self._plan.shard))
        return packed(own, matrix.num_out, self._dtype_of(linear), self._device) if own else None

    def _vocabulary(self, adapter: Adapter) -> Adapter:
        def there(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(self._device)

        def low_rank(part: LowRank | None) -> LowRank | None:
            if part is None:
                return None
            on_device = part.a.to(self._device), part.b.to(self._device)
            return LowRank(*on_device, there(part.bias), there(part.factors))

        return replace(
            adapter,
            parts={},
            embedding=low_rank(adapter.embedding),
            head=low_rank(adapter.head),
            own_embedding=there(adapter.own_embedding),
            own_head=there(adapter.own_head),
            base_embedding=None,
        )


@dataclass(frozen=True, slots=True)
class SegmentedLinear(Linear):
    """A layer to whose products the adapters of a step's rows are added."""

    base: Linear | None = None
    adapters: DeviceAdapters | None = None
    index: int = 0  # among its matrices

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear. [num_rows, in_features], contiguous."""
        assert self.base is not None
        assert self.adapters is not None
        y = self.base(x)
        self.adapters.add(self.index, x, y, self.bias)
        return y


def packed(
    own: Sequence[tuple[slice, LowRank]], num_out: int, dtype: torch.dtype, device: torch.device
) -> DeviceAddition:
    """Put low-rank matrices on the GPU, each with its rows of the matrix; some may share A."""
    every_a = {each.a.data_ptr(): each.a for _, each in own}
    starts = dict(zip(every_a, accumulate(map(len, every_a.values()), initial=0), strict=False))
    num_ranks = sum(map(len, every_a.values()))
    num_ranks += -num_ranks % _TILE
    a = torch.zeros(num_ranks, next(iter(every_a.values())).shape[1], dtype=dtype)
    b = torch.zeros(num_out, num_ranks, dtype=dtype)
    bias = factors = None
    for address, some in every_a.items():
        a[starts[address] : starts[address] + len(some)] = some
    for rows, each in own:
        first = starts[each.a.data_ptr()]
        b[rows, first : first + each.b.shape[1]] = each.b.to(dtype)
        if each.bias is not None:
            bias = torch.zeros(num_out) if bias is None else bias
            bias[rows] = each.bias
        if each.factors is not None:
            factors = torch.ones(num_out) if factors is None else factors
            factors[rows] = each.factors
    vectors = [None if each is None else each.to(device) for each in (bias, factors)]
    return DeviceAddition(a.to(device), b.to(device), *vectors)


def add_low_rank(
    table: Tensor,
    rows: Tensor,
    slots: Tensor,
    most_ranks: int,
    x: Tensor,
    y: Tensor,
    bias: Tensor | None,
) -> None:
    """Launch the two products of some adapters; see `DeviceAdapters.add`.

    Args:
        table: [num_slots, 5] int64, contiguous, of this matrix.
        rows: [num_tiles * 16] int32: of x and y; -1 fills up.
        slots: [num_tiles] int32: whose rows these are.
        most_ranks: that a slot has, a multiple of 16.
        x: as there; of the dtype of A.
        y: as there; of the dtype of B.
        bias: as there.
    """
    num_tiles, (_, num_in), (_, num_out) = len(slots), x.shape, y.shape
    if not (x.is_contiguous() and y.is_contiguous() and table.is_contiguous()):
        raise ValueError("inputs, products and tables must be contiguous")
    if len(rows) != num_tiles * _TILE or table.dtype != torch.int64 or len(x) != len(y):
        raise ValueError(f"{len(rows)} rows in {num_tiles} tiles; x {len(x)} rows, y {len(y)}")
    if num_tiles == 0:
        return
    inner = torch.empty(len(rows), most_ranks, dtype=torch.float32, device=x.device)
    block_k, block_n = (128, 128) if x.dtype.itemsize == 2 else (64, 64)
    shrink_rows[(num_tiles, most_ranks // _TILE)](
        x,
        table,
        rows,
        slots,
        inner,
        most_ranks,
        NUM_IN=num_in,
        BLOCK_M=_TILE,
        BLOCK_R=_TILE,
        BLOCK_K=block_k,
        enable_fp_fusion=True,
        num_warps=4,
    )
    expand_rows[(num_tiles, int(triton.cdiv(num_out, block_n)))](
        inner,
        table,
        rows,
        slots,
        y if bias is None else bias,
        y,
        most_ranks,
        NUM_OUT=num_out,
        HAS_BIAS=bias is not None,
        BLOCK_M=_TILE,
        BLOCK_N=block_n,
        BLOCK_R=_TILE,
        enable_fp_fusion=True,
        num_warps=4,
    )


def _parts_of_stacks(layer: LayerPlan) -> Iterator[Part]:
    for each in (*layer.mlp.experts, *layer.heads):
        for matrix in each.values():
            yield from matrix.parts
