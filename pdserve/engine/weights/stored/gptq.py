"""GPTQ: words hold inputs of one output; `g_idx` says which group an input is of."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdserve.engine.models.quantised.scheme import Scheme
from pdserve.engine.weights.stored.matrix import StoredMatrix, Words
from pdserve.engine.weights.stored.module import FLOATS, INT32, Module
from pdserve.shared.errors import MisshapedTensor


def gptq_matrix(module: Module, scheme: Scheme) -> StoredMatrix:
    """Raises ModelError: a tensor is missing, or is not as the scheme and the config make it."""
    num_out, num_in = module.shape
    bits = scheme.bits
    is_dense = 32 % bits > 0
    if num_in * bits % 32 or (is_dense and num_out * bits % 32):
        raise MisshapedTensor(
            f"{module.name} has {num_out} outputs and {num_in} inputs; GPTQ with {bits} bits has "
            f"multiples of {32 // math.gcd(32, bits)}{'' if is_dense else ' of inputs'}"
        )
    _, groups = module.whole_groups(scheme)
    words = module.take("qweight", INT32, (num_in * bits // 32, num_out))
    zeros = module.take("qzeros", INT32, (groups, -(-num_out * bits // 32)))
    scales = module.take("scales", FLOATS, (groups, num_out))
    zero: Words | int = Words(
        _one_more(zeros, bits) if scheme.zeros_less_one and not is_dense else zeros,
        bits,
        (num_out, groups),
        is_transposed=True,
        is_dense=is_dense,
    )
    if scheme.zeros_less_one and is_dense:  # stored otherwise by each writer
        zero = 1 << bits - 1
    return StoredMatrix(
        module.shape,
        Words(words.T, bits, module.shape, is_dense=is_dense),
        scales.T,
        scheme.group,
        zero,
        group_of=module.group_order("g_idx", groups, scheme.group[1]),
        rounded=scales.dtype,
    )


def _one_more(zeros: Tensor, bits: int) -> Tensor:
    """Add 1 to each number of words, as the first version has one less.

    To whole words, since a zero point of 0 was written by taking 1 away from a whole word.
    """
    ones = sum(1 << bit for bit in range(0, 32, bits))
    return zeros + torch.tensor(ones, dtype=torch.int32)
