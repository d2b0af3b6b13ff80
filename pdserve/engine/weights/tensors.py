"""The tensors of a checkpoint's safetensors files: memory-mapped, and all of them validated.

A missing, misshapen or unknown tensor is an error, because the model would run but give wrong
answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.errors import MisshapedTensor, MissingTensor, ModelError
from pdserve.model_files.git_lfs import refuse_pointer

# Tables that older exporters saved although they follow from config.json.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
# As transformers 5 has them in memory, and can be told to save them: all experts in one tensor.
_FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_CONVERTIBLE = {torch.float32, torch.float64, torch.float16, torch.bfloat16}

Shapes = Mapping[str, tuple[int, ...]]  # tensor name |-> its shape


def open_tensors(
    files: list[Path], expected: Shapes, *, ties_embeddings: bool
) -> dict[str, Tensor]:
    """Return name |-> tensor, in the order of the files. Tensors share the mapped file's pages.

    Args:
        files: of one checkpoint.
        expected: the tensors that the model has.
        ties_embeddings: ignore a copy of the embedding that is stored as the output head.

    Raises:
        MissingTensor: the files lack a tensor.
        MisshapedTensor: a tensor's shape contradicts config.json.
        ModelError: a file is damaged, or holds tensors that the model does not have.
    """
    found: dict[str, Tensor] = {}
    unexpected: list[str] = []
    for file in files:
        for name, tensor in _tensors(file):
            if name in expected:
                _check(file, name, tensor, expected[name])
                found[name] = tensor
            elif not _is_harmless(name, ties_embeddings):
                unexpected.append(name)
    folder = files[0].parent
    if fused := [name for name in unexpected if _FUSED.search(name)]:
        raise ModelError(
            f"{folder} holds {_listed(fused)}, each with all experts of a layer; save the model "
            "with tensors for each expert, which save_pretrained does by default"
        )
    if missing := expected.keys() - found.keys():
        raise MissingTensor(f"{folder} lacks {_listed(missing)}")
    if unexpected:
        raise ModelError(
            f"{folder} holds {_listed(unexpected)}, which config.json does not account for"
        )
    return found


def _tensors(file: Path) -> list[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            return [(name, tensors.get_tensor(name)) for name in tensors.offset_keys()]
    except (SafetensorError, OSError) as error:
        refuse_pointer(file)
        raise ModelError(f"{file} is damaged or cannot be read: {error}") from error


def _check(file: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise MisshapedTensor(
            f"{file}: {name} has the shape {list(tensor.shape)}, but config.json makes it "
            f"{list(shape)}"
        )
    if tensor.dtype not in _CONVERTIBLE:
        raise ModelError(
            f"{file}: {name} is of type {tensor.dtype}; quantised weights are not supported"
        )


def _is_harmless(name: str, ties_embeddings: bool) -> bool:
    is_tied_copy = ties_embeddings and name == "lm_head.weight"
    return is_tied_copy or _DERIVED.search(name) is not None


def _listed(names: Iterable[str]) -> str:
    """Return the first three names, and how many more there are."""
    every = sorted(names)
    more = len(every) - 3
    return ", ".join(every[:3]) + (f" and {more} more" if more > 0 else "")
