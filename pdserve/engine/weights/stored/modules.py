"""Finds the matrices of a quantised checkpoint among its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from pdserve.engine.models.quantised.scheme import Layout, Quantisation, Scheme
from pdserve.engine.weights.stored.awq import awq_matrix
from pdserve.engine.weights.stored.bitsandbytes import matrix_of_4_bits, matrix_of_8_bits
from pdserve.engine.weights.stored.fp4 import fp4_matrix
from pdserve.engine.weights.stored.gptq import gptq_matrix
from pdserve.engine.weights.stored.module import DTYPES, Module
from pdserve.engine.weights.stored.packed import packed_matrix
from pdserve.engine.weights.stored.scaled import scaled_matrix
from pdserve.engine.weights.stored.tensors import Shapes, StoredTensor
from pdserve.engine.weights.stored.torchao import torchao_matrix

# A row for each layout.
_READERS: Final[Mapping[Layout, Callable[[Module, Scheme], StoredTensor]]] = {
    Layout.AWQ: awq_matrix,
    Layout.GPTQ: gptq_matrix,
    Layout.PACKED: packed_matrix,
    Layout.SCALED: scaled_matrix,
    Layout.FP4: fp4_matrix,
    Layout.BITSANDBYTES_4: matrix_of_4_bits,
    Layout.BITSANDBYTES_8: matrix_of_8_bits,
    Layout.TORCHAO: torchao_matrix,
}
# Any of these beside a weight, or in its place, shows that it is quantised.
_SIGNS: Final = (
    "qweight",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight.absmax",
    "SCB",
    "_weight_qdata",
)
# Of activations and of a quantised KV cache: neither is quantised here.
_UNUSED: Final = re.compile(r"\.((input|output|activation|[qkv])_(scale|zero_point|global_scale))$")


def quantised_matrices(
    tensors: Mapping[str, Tensor],
    file_of: Mapping[str, Path],
    expected: Shapes,
    quantisation: Quantisation,
) -> tuple[dict[str, StoredTensor], set[str]]:
    """Return name |-> matrix of those that are quantised, and the tensors that these use up.

    Args:
        tensors: all that the files hold.
        file_of: the file of each.
        expected: the tensors that the model has.
        quantisation: how modules are stored.

    Raises:
        ModelError: what a matrix needs is missing, or is not as the config makes it.
    """
    used = {name for name in tensors if _UNUSED.search(name)}
    matrices: dict[str, StoredTensor] = {}
    dtype = DTYPES.get(quantisation.dtype, torch.float32)
    for name, shape in expected.items():
        module = name.removesuffix(".weight")
        if len(shape) != 2 or not any(f"{module}.{sign}" in tensors for sign in _SIGNS):
            continue
        scheme = quantisation.scheme_of(module)
        of_module = Module(module, (shape[0], shape[1]), tensors, file_of, used, dtype)
        matrices[name] = _READERS[scheme.layout](of_module, scheme)
        bias = f"{module}.bias"
        if bias in tensors and bias not in expected and not tensors[bias].any():
            used.add(bias)  # older writers gave one to all, of zeros
    return matrices, used
