"""Numbers of 8 bits with scales: int8 and FP8 of compressed-tensors, DeepSeek and modelopt."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pdserve.engine.models.quantised.scheme import Scheme
from pdserve.engine.weights.stored.matrix import StoredMatrix
from pdserve.engine.weights.stored.module import FLOATS, Module

FLOAT8: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
INT8: Final = frozenset({torch.int8})
_SCALES: Final = FLOATS | {torch.float8_e8m0fnu, torch.uint8}  # the last: as the one before


def scaled_matrix(module: Module, scheme: Scheme) -> StoredMatrix:
    """Raises ModelError: a tensor is missing, or is not as the scheme and the config make it."""
    codes = module.take("weight", FLOAT8 if scheme.is_float else INT8, module.shape)
    groups = module.num_groups(scheme)
    name = "weight_scale_inv" if module.find("weight_scale_inv") is not None else "weight_scale"
    scales = powers(module.take(name, _SCALES, *module.shapes_of(groups)))
    zeros: Tensor | int = 0
    if not scheme.is_symmetric:
        zeros = module.take("weight_zero_point", INT8, *module.shapes_of(groups)).reshape(groups)
    elif module.find("weight_zero_point") is not None:  # which is of no meaning
        pass
    return StoredMatrix(
        module.shape,
        codes,
        scales.reshape(groups),
        scheme.group,
        zeros,
        rounded=scales.dtype if scheme.rounds and scales.dtype in FLOATS else torch.float32,
    )


def powers(scales: Tensor) -> Tensor:
    """Bytes are exponents of 2, plus 127; others are as they are."""
    return scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
