"""torchao: int8 and FP8, of which the shape of scales tells the groups."""

from __future__ import annotations

from torch import Tensor

from pdserve.engine.models.quantised.scheme import Scheme
from pdserve.engine.weights.stored.matrix import StoredMatrix
from pdserve.engine.weights.stored.module import FLOATS, Module
from pdserve.engine.weights.stored.scaled import FLOAT8, INT8


def torchao_matrix(module: Module, scheme: Scheme) -> StoredMatrix:
    """Raises ModelError: a tensor is missing, or is not as the config makes it."""
    num_out, num_in = module.shape
    codes = module.take("_weight_qdata", FLOAT8 if scheme.is_float else INT8, module.shape)
    scales = module.take("_weight_scale", FLOATS)
    groups = (*scales.shape, 1, 1)[:2]
    if scales.ndim > 2 or not all(groups) or num_out % groups[0] or num_in % groups[1]:
        raise module.error(
            "_weight_scale",
            f"has the shape {list(scales.shape)}, which does not divide {list(module.shape)}",
        )
    zeros: Tensor | int = 0
    if module.find("_weight_zero_point") is not None:
        zeros = module.take("_weight_zero_point", INT8, tuple(scales.shape)).reshape(groups)
    return StoredMatrix(
        module.shape,
        codes,
        scales.reshape(groups),
        (num_out // groups[0], num_in // groups[1]),
        zeros,
        rounded=module.dtype,
    )
