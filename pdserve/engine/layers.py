"""The layers other than attention, in plain torch. Rounds where the reference rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.models.arithmetic import Activation, Arithmetic
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.plan.forms import FLOAT32
from pdserve.engine.plan.matrix import Matrix
from pdserve.engine.ranks.collectives import ALONE, Collectives
from pdserve.model_files.coding import Codes


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type of this name: of activations, or of the codes of a form."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@dataclass(frozen=True, slots=True)
class Linear:
    """x · weightᵀ + bias; or a stack of such, of which `[number]` is one."""

    weight: Tensor  # [out_features, in_features]; of a stack, [number of them, ...], as all here
    bias: Tensor | None  # [out_features]
    scales: Tensor | None = (
        None  # [out_features] float32, of the weights' rows; None: they have none
    )

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if self.scales is None:
            return functional.linear(x, self.weight, self.bias)
        scaled = functional.linear(x, self.weight.to(x.dtype)) * self.scales
        return (scaled if self.bias is None else scaled + self.bias).to(x.dtype)

    @property
    def in_features(self) -> int:
        """Columns of x."""
        return self.weight.shape[-1]

    def of_rows(self, rows: Tensor) -> Linear:
        """Return what some rows of a step are multiplied by, which are x then."""
        return self

    def stored(self, rows: slice) -> Tensor:
        """Return the memory of some rows' weights."""
        return self.weight[rows]

    def checked(self, rows: slice) -> Tensor:
        """Return what is finite if and only if these rows are."""
        return self.weight[rows] if self.scales is None else self.scales[rows]

    @property
    def keeps_codes(self) -> bool:
        """Whether `put` takes codes."""
        return False

    def put(self, first_row: int, rows: Tensor | Codes) -> None:
        """Fill rows from this one on, of a matrix that has scales, with weights or with codes."""
        assert isinstance(rows, Tensor), "no codes are kept so"
        assert self.scales is not None, "others are copied"
        codes, scales = quantised(rows, self.weight.dtype)
        there = slice(first_row, first_row + len(rows))
        self.weight[there] = codes
        self.scales[there] = scales

    def __getitem__(self, number: int) -> Linear:
        """Return one of a stack."""
        bias = None if self.bias is None else self.bias[number]
        scales = None if self.scales is None else self.scales[number]
        return Linear(self.weight[number], bias, scales)


def empty_linear(matrix: Matrix, dtype: torch.dtype, device: torch.device, *stack: int) -> Linear:
    """Allocate memory for a matrix, or for a stack of so many like it, in its form.

    Args:
        matrix: as planned.
        dtype: of its bias, unless weights are float32.
        device: where it will be.
        stack: how many there are; nothing: it is none.
    """
    form = matrix.form
    assert form.coding is None, form.name
    assert form.group in ((0, 0), (1, 0)), form.name
    rows = (*stack, matrix.num_out)
    bias_dtype = torch.float32 if form is FLOAT32 else dtype  # of what all compute in float32
    return Linear(
        torch.empty((*rows, matrix.num_in), dtype=torch_dtype(form.dtype), device=device),
        torch.empty(rows, dtype=bias_dtype, device=device) if matrix.has_bias else None,
        torch.empty(rows, device=device) if form.is_quantised else None,
    )


def quantised(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes of `dtype` and a scale for each row of [rows, in_features].

    The largest magnitude of a row has the largest code.
    """
    wide = weight.float()
    largest = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max
    scales = wide.abs().amax(dim=1) / largest
    ratios = (wide / scales.where(scales > 0, 1.0)[:, None]).clamp(-largest, largest)
    return (ratios if dtype.is_floating_point else ratios.round()).to(dtype), scales


Gated: TypeAlias = Callable[[Tensor], Tensor]  # [..., 2 * size], gate and then up, -> [..., size]


def gated_silu(rows: Tensor) -> Tensor:
    """Return silu(gate) * up. See Gated."""
    gate, up = rows.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gated_gelu(rows: Tensor) -> Tensor:
    """Return gelu(gate) * up. See Gated."""
    gate, up = rows.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def gated_clamped(rows: Tensor) -> Tensor:
    """Return gate * sigmoid(1.702 * gate) * (up + 1), both clamped at 7. See Gated."""
    gate, up = rows.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (gate * 1.702).sigmoid_().mul_(gate).mul_(up + 1)


GATED: Final = {
    Activation.SILU: gated_silu,
    Activation.GELU_TANH: gated_gelu,
    Activation.CLAMPED: gated_clamped,
}


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(activation(gate(x)) * up(x))."""

    gate_up: Linear  # the rows of gate, then those of up: [2 * intermediate_size, hidden_size]
    down: Linear  # [hidden_size, intermediate_size]

    @property
    def linears(self) -> dict[str, Linear]:
        """Its matrices, by the names of the plan."""
        return {"gate_up": self.gate_up, "down": self.down}

    def __call__(self, x: Tensor, gated: Gated = gated_silu) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        return self.down(gated(self.gate_up(x)))


def embedding_factor(arithmetic: Arithmetic, dtype: torch.dtype) -> float:
    """The factor of embedded tokens in a model whose activations have this dtype."""
    rounded = torch.tensor(arithmetic.embedding_scale).to(dtype).item()
    return rounded / arithmetic.residual_scale


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    centres: bool = False,
    num_dims: int = 1,
    mean_square: Tensor | None = None,
) -> Tensor:
    """Normalize rows to a root mean square of 1 in float32; multiply by `weight` in its dtype.

    Args:
        x: [..., size], whose dtype the result has.
        weight: [size], or anything that broadcasts to x.
        eps: added to the mean square.
        centres: subtract the mean first.
        num_dims: how many of the last dimensions are a row.
        mean_square: of each row; None: that of what is here of it.
    """
    wide, dims = x.float(), tuple(range(-num_dims, 0))
    if centres:
        wide = wide - wide.mean(dim=dims, keepdim=True)
    if mean_square is None:
        mean_square = wide.square().mean(dim=dims, keepdim=True)
    normed = wide * torch.rsqrt(mean_square + eps)
    return weight * normed.to(x.dtype) if weight.dtype == x.dtype else (weight * normed).to(x.dtype)


def head_norm(
    heads: Tensor, weight: Tensor, own: ModelConfig, ranks: Collectives = ALONE
) -> Tensor:
    """Normalise the query and key heads of a rank: each, or all queries and all keys of a token.

    Args:
        heads: [num_tokens, num_heads + num_kv_heads, head_dim].
        weight: [num_heads + num_kv_heads, head_dim].
        own: the model as the rank has it.
        ranks: those that have the other heads.
    """
    if not own.arithmetic.norms_heads_together:
        return rms_norm(heads, weight, own.rms_norm_eps)
    sizes, num_ranks = [own.num_heads, own.num_kv_heads], ranks.shard.num_ranks
    kinds, means = torch.split(heads, sizes, dim=1), None
    if num_ranks > 1:
        # Ranks have equally many of each kind. Heads that several have are all so equally often.
        squares = [kind.float().square().mean(dim=(1, 2), keepdim=True) for kind in kinds]
        means = ranks.all_reduce(torch.stack(squares)) / num_ranks
    normed = [
        rms_norm(kind, own_weight, own.rms_norm_eps, num_dims=2, mean_square=mean)
        for kind, own_weight, mean in zip(
            kinds, torch.split(weight, sizes), (None, None) if means is None else means, strict=True
        )
    ]
    return torch.cat(normed, dim=1)


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Return x, pulled to within cap."""
    return x if cap is None else cap * torch.tanh(x / cap)
