"""FP4 (E2M1) with scales of 8 bits: NVFP4 and MXFP4, of compressed-tensors and modelopt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pdserve.engine.models.quantised.scheme import Scheme
from pdserve.engine.weights.stored import Part, StoredTensor
from pdserve.engine.weights.stored_matrix import StoredMatrix, Words
from pdserve.engine.weights.stored_module import UINT8, Module
from pdserve.engine.weights.stored_scaled import powers
from pdserve.shared.errors import MisshapedTensor

_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1: Final = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
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


def fp4_matrix(module: Module, scheme: Scheme) -> StoredMatrix:
    """Raises ModelError: a tensor is missing, or is not as the scheme and the config make it."""
    num_out, num_in = module.shape
    groups = module.whole_groups(scheme)
    if num_in % 2:
        raise MisshapedTensor(f"{module.name} has {num_in} inputs; FP4 has pairs of them")
    name = "weight_packed" if scheme.rounds else "weight"
    words = module.take(name, UINT8, (num_out, num_in // 2))
    scales: StoredTensor
    if scheme.group[1] == 32:
        scales = powers(module.take("weight_scale", _MX_SCALES, groups))
    else:
        shared = "weight_global_scale" if scheme.rounds else "weight_scale_2"
        scales = _TwoLevels(
            module.take("weight_scale", _NV_SCALES, groups),
            module.take(shared, _FLOAT32, (1,), ()).reshape(()),
            divides=scheme.rounds,
        )
    return StoredMatrix(
        module.shape,
        Words(words, 4, module.shape),
        scales,
        scheme.group,
        table=_E2M1,
        rounded=torch.bfloat16 if scheme.rounds else torch.float32,
    )
