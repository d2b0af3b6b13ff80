"""Matrices of 4- and 8-bit weights on a GPU, in the order in which its kernels read them.

Codes are repacked once, when they are loaded: panels of 16 outputs are for vectors of a CPU, but a
GPU's programs read a tile of 64 inputs of many outputs at a time. So a chunk of 64 inputs has all
outputs one after the other, and every tile is one stretch of memory, however few inputs share a
scale. Of 4 bits, a byte has the codes of input i and, above it, of i + 32. Codes of 5 and 6 bits
become bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.cuda.quantised.products import CHUNK, Kind, Weights, multiply, warm_up
from pdserve.engine.layers import Linear, empty_linear, quantised, torch_dtype
from pdserve.engine.models.parameters import DecoderWeights
from pdserve.engine.plan.matrix import Matrix
from pdserve.engine.weights.quantise import quantised as grouped
from pdserve.model_files.coding import SUPER_INPUTS, Codes, Coding, ScaleType

_PLAIN: Final = Kind()
_PARTS: Final = ("scales", "minimums", "super_scales", "super_minimums")


@dataclass(frozen=True, slots=True)
class QuantisedLinear(Linear):
    """A layer whose weights are codes: `weight` is [chunks, out_features, bytes of a chunk].

    Numbers of groups are [groups, out_features], those that groups share [supers, out_features]
    float16. Without groups, `scales` is [out_features] float32.
    """

    num_in: int = 0
    kind: Kind = _PLAIN
    coding: Coding | None = None  # None: an output has one scale
    keeps: bool = False  # a checkpoint's codes
    minimums: Tensor | None = None
    super_scales: Tensor | None = None
    super_minimums: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features]. Adds no rows to those of x."""
        return multiply(x, self.weights)

    @property
    def in_features(self) -> int:
        """See Linear."""
        return self.num_in

    @property
    def weights(self) -> Weights:
        """What kernels take."""
        assert self.scales is not None
        numbers = (self.scales, self.minimums, self.super_scales, self.super_minimums)
        return Weights(self.kind, self.num_in, self.weight, *numbers, self.bias)

    def __getitem__(self, number: int) -> QuantisedLinear:
        """See Linear."""

        def one(stack: Tensor | None) -> Tensor | None:
            return None if stack is None else stack[number]

        return QuantisedLinear(
            self.weight[number],
            one(self.bias),
            one(self.scales),
            self.num_in,
            self.kind,
            self.coding,
            self.keeps,
            one(self.minimums),
            one(self.super_scales),
            one(self.super_minimums),
        )

    def stored(self, rows: slice) -> Tensor:
        """See Linear."""
        return self.weight[:, rows]

    def checked(self, rows: slice) -> Tensor:
        """See Linear."""
        assert self.scales is not None
        if self.coding is None:
            return self.scales[rows, None]
        numbers = self.scales if self.super_scales is None else self.super_scales
        return numbers[:, rows].mT

    @property
    def keeps_codes(self) -> bool:
        """See Linear."""
        return self.keeps

    def put(self, first_row: int, rows: Tensor | Codes) -> None:
        """See Linear."""
        if self.coding is not None:
            codes = rows if isinstance(rows, Codes) else grouped(rows, self.coding)
            self._put_codes(first_row, codes.within(self.coding))
            return
        assert isinstance(rows, Tensor), "no codes are kept so"
        assert self.scales is not None
        codes_of, scales = quantised(rows, self._code_dtype)
        self._put_bytes(first_row, codes_of.view(torch.uint8))
        self.scales[first_row : first_row + len(rows)] = scales

    @property
    def _code_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.kind.is_float else torch.int8

    def _put_codes(self, first_row: int, codes: Codes) -> None:
        assert self.coding is not None
        own = torch.from_numpy(np.ascontiguousarray(codes.codes)).to(self.weight.device)
        self._put_bytes(first_row, own if self.coding.bits == 4 else own ^ 128)
        for name in _PARTS:
            numbers: NDArray[Any] | None = getattr(codes, name)
            if numbers is not None:
                there: Tensor = getattr(self, name)
                made = torch.from_numpy(np.ascontiguousarray(numbers.T))
                there[: len(made), first_row : first_row + len(codes.codes)] = made.to(there.device)

    def _put_bytes(self, first_row: int, rows: Tensor) -> None:
        """[num_rows, in_features] uint8: of 8 bits, as they are in memory."""
        missing = len(self.weight) * CHUNK - rows.shape[1]
        rows = torch.nn.functional.pad(rows, (0, missing)).view(len(rows), -1, CHUNK)
        if self.kind.bits == 4:
            low, high = rows.chunk(2, dim=2)
            rows = low | high << 4
        there = self.weight[:, first_row : first_row + len(rows)]
        there.copy_(rows.transpose(0, 1).view(there.dtype))


def device_linear(matrix: Matrix, dtype: torch.dtype, device: torch.device, *stack: int) -> Linear:
    """As `empty_linear`, for GPUs: those of quantised forms are zeros, to be `put`."""
    form, coding = matrix.form, matrix.form.coding
    if coding is None and not form.is_quantised:
        return empty_linear(matrix, dtype, device, *stack)
    kind = Kind.of(form)
    chunks, num_out = -(-matrix.num_in // CHUNK), matrix.num_out

    def zeros(*sizes: int, of: torch.dtype) -> Tensor:
        return torch.zeros((*stack, *sizes), dtype=of, device=device)

    is_signed = kind.bits == 8 and not kind.is_float
    codes = zeros(chunks, num_out, 8 * kind.bits, of=torch.int8 if is_signed else torch.uint8)
    bias = zeros(num_out, of=dtype) if matrix.has_bias else None
    if coding is None:
        scales = zeros(num_out, of=torch.float32)
        return QuantisedLinear(codes, bias, scales, matrix.num_in, kind)
    padded = kind.padded(matrix.num_in)
    groups, supers = padded // coding.group, padded // SUPER_INPUTS
    of = torch_dtype(str(coding.scale.dtype))
    has_lows, has_supers = coding.has_minimums, coding.scale.has_supers
    own_supers = has_lows and coding.scale is ScaleType.TWO_LEVELS
    return QuantisedLinear(
        codes,
        bias,
        zeros(groups, num_out, of=of),
        matrix.num_in,
        kind,
        coding,
        form.keeps_stored,
        zeros(groups, num_out, of=of) if has_lows else None,
        zeros(supers, num_out, of=torch.float16) if has_supers else None,
        zeros(supers, num_out, of=torch.float16) if own_supers else None,
    )


def warm_up_products(weights: DecoderWeights, dtype: torch.dtype) -> None:
    """Compile what products of all quantised matrices launch; `dtype`: of activations."""
    layers = [linear for layer in weights.layers for linear in layer.linears]
    for linear in [*layers, weights.lm_head]:
        if isinstance(linear, QuantisedLinear):
            warm_up(linear.weights, dtype)
