"""AWQ ("gemm"): words hold eight outputs of one input, in an order of their own."""

from __future__ import annotations

from typing import Final

from pdserve.engine.models.quantised.scheme import Scheme
from pdserve.engine.weights.stored.matrix import StoredMatrix, Words
from pdserve.engine.weights.stored.module import FLOATS, INT32, Module
from pdserve.shared.errors import MisshapedTensor

_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_matrix(module: Module, scheme: Scheme) -> StoredMatrix:
    """Raises ModelError: a tensor is missing, or is not as the scheme and the config make it."""
    num_out, num_in = module.shape
    if num_out % 8:
        raise MisshapedTensor(f"{module.name} has {num_out} outputs; AWQ has multiples of 8")
    _, groups = module.whole_groups(scheme)
    words = module.take("qweight", INT32, (num_in, num_out // 8))
    zeros = module.take("qzeros", INT32, (groups, num_out // 8))
    scales = module.take("scales", FLOATS, (groups, num_out))
    return StoredMatrix(
        module.shape,
        Words(words, 4, module.shape, _ORDER, is_transposed=True),
        scales.T,
        scheme.group,
        Words(zeros, 4, (num_out, groups), _ORDER, is_transposed=True),
        rounded=scales.dtype,
    )
