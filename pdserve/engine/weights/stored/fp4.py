"""FP4 (E2M1) with scales of 8 bits: NVFP4 and MXFP4, of compressed-tensors and modelopt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pdserve.engine.models.quantised.scheme import Scheme
from pdserve.engine.weights.stored.matrix import StoredMatrix, Words, ranges
from pdserve.engine.weights.stored.module import UINT8, Module
from pdserve.engine.weights.stored.scaled import powers
from pdserve.engine.weights.stored.tensors import Part, StoredTensor
from pdserve.model_files.coding import Codes, Coding, ScaleType
from pdserve.shared.errors import MisshapedTensor

_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1: Final = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
_MX_CODING: Final = Coding(5, 32, 16, ScaleType.FLOAT32)  # as GGUF files' MXFP4 has
_MX_CODES: Final = (2 * _E2M1 + _MX_CODING.zero).to(torch.uint8)
_FLOAT32: Final = frozenset({torch.float32})
_NV_SCALES: Final = frozenset({torch.float8_e4m3fn})
_MX_SCALES: Final = frozenset({torch.uint8, torch.float8_e8m0fnu})


@dataclass(frozen=True, slots=True)
class _TwoLevels:
    """Scales, each times or over one that all share."""

    scales: Tensor
    shared: Tensor
    divides: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.scales.shape)

    def __getitem__(self, part: Part) -> Tensor:
        own = self.scales[part].float()
        return own / self.shared if self.divides else own * self.shared


@dataclass(frozen=True, slots=True)
class MxMatrix:
    """One whose scales are powers of 2. Its codes are the doubled weights, which are whole."""

    decoded: StoredMatrix

    @classmethod
    def of(cls, words: Tensor, scales: Tensor, rounded: torch.dtype = torch.bfloat16) -> MxMatrix:
        """
        Args:
            words: [outputs, inputs / 2] uint8, the even input in the low bits.
            scales: [outputs, inputs / 32], exponents.
            rounded: the type of weights.
        """
        shape = words.shape[0], 2 * words.shape[1]
        return cls(
            StoredMatrix(
                shape, Words(words, 4, shape), powers(scales), (1, 32), table=_E2M1, rounded=rounded
            )
        )

    @property
    def shape(self) -> tuple[int, int]:
        """See `StoredTensor`."""
        return self.decoded.shape

    def __getitem__(self, part: Part) -> Tensor:
        """See `StoredTensor`."""
        return self.decoded[part]

    @property
    def coding(self) -> Coding | None:
        """See `CodedTensor`."""
        return _MX_CODING

    def coded(self, part: Part) -> Codes:
        """See `CodedTensor`."""
        rows, columns = ranges(part, self.shape)
        cut, size = slice(rows.start, rows.stop), _MX_CODING.group
        codes = self.decoded.codes[cut, slice(columns.start, columns.stop)]
        groups = slice(columns.start // size, -(-columns.stop // size))
        halves = self.decoded.scales[cut, groups].float() / 2
        return Codes(_MX_CODING, _MX_CODES[codes.int()].numpy(), halves.numpy())

    def bad_row(self) -> int | None:
        """See `ScaledTensor`."""
        return self.decoded.bad_row()


def fp4_matrix(module: Module, scheme: Scheme) -> StoredTensor:
    """Raises ModelError: a tensor is missing, or is not as the scheme and the config make it."""
    num_out, num_in = module.shape
    groups = module.whole_groups(scheme)
    if num_in % 2:
        raise MisshapedTensor(f"{module.name} has {num_in} inputs; FP4 has pairs of them")
    name = "weight_packed" if scheme.rounds else "weight"
    words = module.take(name, UINT8, (num_out, num_in // 2))
    rounded = torch.bfloat16 if scheme.rounds else torch.float32
    if scheme.group[1] == 32:
        return MxMatrix.of(words, module.take("weight_scale", _MX_SCALES, groups), rounded)
    shared = "weight_global_scale" if scheme.rounds else "weight_scale_2"
    scales = _TwoLevels(
        module.take("weight_scale", _NV_SCALES, groups),
        module.take(shared, _FLOAT32, (1,), ()).reshape(()),
        divides=scheme.rounds,
    )
    numbers = Words(words, 4, module.shape)
    return StoredMatrix(module.shape, numbers, scales, scheme.group, table=_E2M1, rounded=rounded)
