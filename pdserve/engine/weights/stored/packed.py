"""Integers of compressed-tensors, packed into words along the inputs."""

from __future__ import annotations

from pdserve.engine.models.quantised.scheme import Scheme
from pdserve.engine.weights.stored.matrix import StoredMatrix, Words
from pdserve.engine.weights.stored.module import FLOATS, INT32, Module
from pdserve.shared.errors import MisshapedTensor


def packed_matrix(module: Module, scheme: Scheme) -> StoredMatrix:
    """Raises ModelError: a tensor is missing, or is not as the scheme and the config make it."""
    num_out, num_in = module.shape
    bits, groups = scheme.bits, module.whole_groups(scheme)
    if (said := module.find("weight_shape")) is not None and said.tolist() != list(module.shape):
        raise MisshapedTensor(
            f"{module.name}.weight_shape is {said.tolist()}, but config.json makes it "
            f"{list(module.shape)}"
        )
    dense, loose = _num_words(num_in, bits)
    words = module.take("weight_packed", INT32, (num_out, dense), (num_out, loose))
    if dense == loose and 32 % bits:
        raise module.error(
            "weight_packed",
            f"has {bits} bits, of which libraries have written two layouts, and {num_in} inputs do "
            "not show which it is: write it with 4 or 8 bits",
        )
    is_dense = words.shape[1] != loose
    scales = module.take("weight_scale", FLOATS, *module.shapes_of(groups)).reshape(groups)
    zeros: Words | int = 1 << bits - 1
    stored = module.find("weight_zero_point")  # symmetric ones may have one too, of no meaning
    if not scheme.is_symmetric:
        lines = _num_words(groups[0], bits)[0 if is_dense else 1]
        stored = module.take("weight_zero_point", INT32, (lines, groups[1]))
        zeros = Words(stored.T, bits, groups, is_transposed=True, is_dense=is_dense)
    return StoredMatrix(
        module.shape,
        Words(words, bits, module.shape, is_dense=is_dense),
        scales,
        scheme.group,
        zeros,
        group_of=module.group_order("weight_g_idx", groups[1], scheme.group[1]),
        rounded=scales.dtype,
    )


def _num_words(count: int, bits: int) -> tuple[int, int]:
    """Words of so many numbers that may cross them, as is written now, and that may not."""
    return -(-count * bits // 32), -(-count // (32 // bits))
