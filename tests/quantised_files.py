"""Checkpoints as quantising libraries write them: random codes and scales, and what they stand for.

    quantised(make_checkpoint(tmp_path / "m", "llama"), tmp_path / "awq", AWQ)

Packing and decoding are written from the formats, in numpy, and share nothing with what reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Array = NDArray[Any]
Random = np.random.Generator
# (random, outputs, inputs) -> tensors by what follows the module's name, and the weights
Write = Callable[[Random, int, int], tuple[dict[str, Tensor], Array]]


@dataclass(frozen=True)
class Written:
    """One format."""

    config: dict[str, Any]  # quantization_config
    write: Write
    writes: Callable[[str], bool] = lambda module: "layers" in module and module[-4:] != "gate"


def quantised(made: Path, folder: Path, kind: Written, *, num_files: int = 1) -> Path:
    """Write a checkpoint as `folder`, and what it then holds as a plain one, which is returned."""
    random = np.random.default_rng(7)
    tensors: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    for name, tensor in load_file(made / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.ndim != 2 or not kind.writes(module):
            tensors[name] = decoded[name] = tensor
            continue
        own, weights = kind.write(random, *tensor.shape)
        tensors |= {f"{module}.{suffix}": part for suffix, part in own.items()}
        decoded[name] = tensor_of(weights.astype(np.float32))
    plain = folder.with_name(f"{folder.name}-plain")
    for path, changes in ((folder, {"quantization_config": kind.config}), (plain, {})):
        path.mkdir()
        for file in made.iterdir():
            if file.suffix != ".safetensors":
                (path / file.name).write_bytes(file.read_bytes())
        config = json.loads((made / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | changes))
    save_file(decoded, plain / "model.safetensors")
    save_shards(tensors, folder, num_files)
    return plain


def save_shards(tensors: dict[str, Tensor], folder: Path, num_files: int) -> None:
    """Deal tensors out to files in turn: those of a module are apart."""
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = list(tensors)
    files = {
        f"model-{i + 1:05}-of-{num_files:05}.safetensors": names[i::num_files]
        for i in range(num_files)
    }
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    index = {"weight_map": {name: file for file, own in files.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# ---- packing -------------------------------------------------------------------------------------


def words(numbers: Array, bits: int) -> Array:
    """Along the last dimension, each number where the one before ends: [lines, n] -> int32."""
    places = np.arange(bits)
    stream = (numbers[:, :, None].astype(np.int64) >> places & 1).reshape(len(numbers), -1)
    missing = -stream.shape[1] % 32
    stream = np.pad(stream, ((0, 0), (0, missing))).astype(np.uint8)
    return np.ascontiguousarray(np.packbits(stream, axis=1, bitorder="little")).view(np.int32)


def sparse_words(numbers: Array, bits: int) -> Array:
    """32 // bits numbers a word, the rest of it unused."""
    each = 32 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % each))).astype(np.int64)
    places = padded.reshape(len(numbers), -1, each) << np.arange(each) * bits
    return places.sum(axis=2).astype(np.uint32).view(np.int32)


def tensor_of(array: Array) -> Tensor:
    """In its own memory, in order."""
    return torch.from_numpy(np.ascontiguousarray(array))


def scales_of(random: Random, *shape: int, size: float = 0.02) -> Array:
    """Float16, some negative."""
    signs = random.choice([-1.0, 1.0, 1.0], shape)
    return (random.uniform(0.2, 1.0, shape) * size * signs).astype(np.float16)


# ---- AWQ and GPTQ --------------------------------------------------------------------------------


def awq_of(group: int) -> Write:
    """Words hold columns 0 2 4 6 1 3 5 7 of eight outputs, from the lowest nibble up."""

    def write(random: Random, num_out: int, num_in: int) -> tuple[dict[str, Tensor], Array]:
        size = group if group > 0 else num_in
        codes = random.integers(0, 16, (num_in, num_out))
        zeros = random.integers(0, 16, (num_in // size, num_out))
        scales = scales_of(random, num_in // size, num_out)
        weights = np.empty((num_in, num_out), np.float16)
        for i in range(num_in):
            difference = (codes[i] - zeros[i // size]).astype(np.float16)
            weights[i] = difference * scales[i // size]

        def shuffled(numbers: Array) -> Array:
            eights = numbers.reshape(len(numbers), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
            return words(eights.reshape(numbers.shape), 4)

        made = {
            "qweight": tensor_of(shuffled(codes)),
            "qzeros": tensor_of(shuffled(zeros)),
            "scales": tensor_of(scales),
        }
        return made, weights.T

    return write


def gptq_of(bits: int, group: int, *, is_first: bool = True, is_shuffled: bool = False) -> Write:
    """Words hold inputs; zero points are one less in the first version."""

    def write(random: Random, num_out: int, num_in: int) -> tuple[dict[str, Tensor], Array]:
        size = group if group > 0 else num_in
        codes = random.integers(0, 1 << bits, (num_out, num_in))
        zeros = random.integers(is_first, 1 << bits, (num_in // size, num_out))
        scales = scales_of(random, num_in // size, num_out, size=0.3 / (1 << bits))
        g_idx = np.arange(num_in) // size
        if is_shuffled:
            random.shuffle(g_idx)
        weights = np.empty((num_out, num_in), np.float16)
        for i in range(num_in):
            difference = (codes[:, i] - zeros[g_idx[i]]).astype(np.float16)
            weights[:, i] = difference * scales[g_idx[i]]
        made = {
            "qweight": tensor_of(words(codes, bits).T),
            "qzeros": tensor_of(words(zeros - is_first, bits)),
            "scales": tensor_of(scales),
            "g_idx": tensor_of(g_idx.astype(np.int32)),
        }
        return made, weights

    return write


def gptq_config(bits: int, group: int, **others: Any) -> dict[str, Any]:
    """As gptqmodel writes it."""
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, **others}


AWQ = Written(
    {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
    awq_of(16),
)
GPTQ = Written(gptq_config(4, 32, desc_act=True), gptq_of(4, 32, is_shuffled=True))
GPTQ_2 = Written(gptq_config(8, -1, checkpoint_format="gptq_v2"), gptq_of(8, -1, is_first=False))

FORMATS = {
    "awq": AWQ,
    "gptq": GPTQ,
    "gptq_v2": GPTQ_2,
}
