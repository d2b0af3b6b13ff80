"""bitsandbytes: 4 bits with a table for each block, perhaps with coded scales, and 8 bits."""

from __future__ import annotations

import json
from typing import Any, Final

import torch

from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.quantised.scheme import Scheme
from pdserve.engine.weights.stored.matrix import Folded, StoredMatrix, Words
from pdserve.engine.weights.stored.module import DTYPES, UINT8, Module
from pdserve.engine.weights.stored.scaled import INT8
from pdserve.engine.weights.stored.tensors import StoredTensor
from pdserve.shared.errors import MisshapedTensor

_FLOAT32: Final = frozenset({torch.float32})
_HIGH_FIRST: Final = (1, 0)


def matrix_of_4_bits(module: Module, scheme: Scheme) -> StoredTensor:
    """Raises ModelError: a tensor is missing, or is not as the others and the config make it."""
    state = _state(module)
    if state.integers("shape") != list(module.shape):
        raise state.error("shape", f"{list(module.shape)}, as config.json makes it")
    num_out, num_in = module.shape
    count, size = num_out * num_in, state.integer("blocksize")
    weight = module.find("weight")
    if weight is None or weight.nbytes != -(-count // 2):
        found = "absent" if weight is None else f"{weight.nbytes} bytes"
        raise MisshapedTensor(
            f"{module.name}.weight is {found}, but {count} numbers take {-(-count // 2)}"
        )
    table = module.take("weight.quant_map", _FLOAT32, (16,))
    scales = _scales(module, state, -(-count // size))
    rounded = DTYPES.get(state.text("dtype"))
    if rounded is None:
        raise state.error("dtype", f"one of {', '.join(DTYPES)}")
    words = weight.view(torch.uint8).reshape(1, -1)
    is_even = num_in % size == 0 and num_in % 2 == 0
    shape = module.shape if is_even else (1, count)
    groups = (num_out, num_in // size) if is_even else scales.shape
    matrix = StoredMatrix(
        shape,
        Words(words.reshape(shape[0], -1), 4, shape, _HIGH_FIRST),
        Folded(scales, (groups[0], groups[1])),
        (1, size),
        table=table,
        rounded=rounded,
    )
    return matrix if is_even else Folded(matrix, module.shape)


def matrix_of_8_bits(module: Module, scheme: Scheme) -> StoredMatrix:
    """Raises ModelError: a tensor is missing, or is not as the config makes it."""
    num_out, _ = module.shape
    codes = module.take("weight", INT8, module.shape)
    largest = module.take("SCB", _FLOAT32, (num_out,))
    kind = module.find("weight_format")
    if kind is not None and kind.any():
        raise module.error(
            "weight_format", f"is {kind.tolist()}; it must be 0, which is row by row"
        )
    return StoredMatrix(
        module.shape, codes, (largest / 127).reshape(-1, 1), (1, 0), rounded=module.dtype
    )


def _state(module: Module) -> JsonFields:
    """What the file says of the matrix."""
    for kind in ("nf4", "fp4"):
        suffix = f"weight.quant_state.bitsandbytes__{kind}"
        if module.find(suffix) is None:
            continue
        text = bytes(module.take(suffix, UINT8).tolist())
        try:
            content: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise module.error(suffix, f"is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise module.error(suffix, "must hold a JSON object")
        return JsonFields(content, f"{module.name}.{suffix}")
    suffix = "weight.quant_state.bitsandbytes__nf4"
    module.take(suffix, UINT8)  # says that it is missing
    raise AssertionError(suffix)


def _scales(module: Module, state: JsonFields, count: int) -> StoredTensor:
    """The scale of each block: [1, count]."""
    if "nested_blocksize" not in state:
        return module.take("weight.absmax", _FLOAT32, (count,)).reshape(1, -1)
    codes = module.take("weight.absmax", UINT8, (count,))
    size = state.integer("nested_blocksize")
    return StoredMatrix(
        (1, count),
        codes.reshape(1, -1),
        module.take("weight.nested_absmax", _FLOAT32, (-(-count // size),)).reshape(1, -1),
        (1, size),
        table=module.take("weight.nested_quant_map", _FLOAT32, (256,)),
        offset=state.number("nested_offset"),
    )
