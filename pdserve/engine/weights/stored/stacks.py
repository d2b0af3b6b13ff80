"""Experts as gpt-oss has them: all of a layer in one tensor, as numbers or as MXFP4.

    experts.gate_up_proj          [experts, inputs, outputs], gate and up in turns
    experts.gate_up_proj_bias     [experts, outputs], likewise
    experts.gate_up_proj_blocks   [experts, outputs, groups, 16] of two inputs each, likewise
    experts.gate_up_proj_scales   [experts, outputs, groups]

The same for down_proj, without turns. They become views of each expert's part, by the model's
names, so pages are read where a rank needs them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from pdserve.engine.weights.stored.fp4 import MxMatrix
from pdserve.engine.weights.stored.tensors import StoredTensor
from pdserve.shared.errors import MisshapedTensor, MissingTensor, ModelError

_PARTS: Final[Mapping[str, Mapping[str, slice]]] = {  # of an expert's rows
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}
_BIAS: Final = re.compile(r"(.+\.experts\.(gate_up_proj|down_proj))_bias")
_BLOCK_BYTES: Final = 16  # of 32 inputs


@dataclass(frozen=True, slots=True)
class Unstacked:
    """What becomes of the stacks."""

    tensors: dict[str, StoredTensor]  # by the model's names
    file_of: dict[str, Path]  # of these
    used: set[str]  # the stacks


def unstack(tensors: Mapping[str, Tensor], file_of: Mapping[str, Path]) -> Unstacked:
    """Take the experts apart.

    Other families' experts have no biases, and their stacks other orders: they are left alone.

    Raises:
        ModelError: a stack is incomplete, or not of such a shape or type.
    """
    made = Unstacked({}, {}, set())
    for name, bias in tensors.items():
        if (match := _BIAS.fullmatch(name)) is None:
            continue
        stack, which = match.groups()
        for own, num_dims in (
            (stack, 3),
            (name, 2),
            (f"{stack}_blocks", 4),
            (f"{stack}_scales", 3),
        ):
            if own in tensors and tensors[own].dim() != num_dims:
                raise MisshapedTensor(
                    f"{file_of[own]}: {own} has the shape {list(tensors[own].shape)}; it must have "
                    f"{num_dims} dimensions"
                )
            made.used.update({own} & tensors.keys())
        block = stack.removesuffix(which)
        for expert in range(len(bias)):
            for part, rows in _PARTS[which].items():
                own = f"{block}{expert}.{part}"
                made.tensors[f"{own}.weight"] = _weight(tensors, stack, expert, rows)
                made.tensors[f"{own}.bias"] = bias[expert, rows]
                made.file_of[f"{own}.weight"] = made.file_of[f"{own}.bias"] = file_of[name]
    return made


def _weight(tensors: Mapping[str, Tensor], stack: str, expert: int, rows: slice) -> StoredTensor:
    if stack in tensors:
        return _of(tensors[stack], stack, expert).T[rows]
    for kind in ("blocks", "scales"):
        if (own := f"{stack}_{kind}") not in tensors:
            raise MissingTensor(f"there is a {stack}_bias, but neither {stack} nor {own}")
        if tensors[own].dtype != torch.uint8:
            raise ModelError(f"{own} is of type {tensors[own].dtype}; it must be torch.uint8")
    blocks, scales = (
        _of(tensors[f"{stack}_{kind}"], stack, expert) for kind in ("blocks", "scales")
    )
    if blocks.shape != (*scales.shape, _BLOCK_BYTES):
        raise MisshapedTensor(
            f"{stack}_blocks has {list(blocks.shape)} for each expert, and {stack}_scales "
            f"{list(scales.shape)}: a scale is of {_BLOCK_BYTES} bytes"
        )
    return MxMatrix.of(blocks[rows].flatten(1), scales[rows])


def _of(stack: Tensor, name: str, expert: int) -> Tensor:
    if expert >= len(stack):
        raise MisshapedTensor(f"{name} has {len(stack)} experts, and more have biases")
    return stack[expert]
