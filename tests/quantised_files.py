"""Checkpoints as quantising libraries write them: random codes and scales, and what they stand for.

    quantised(make_checkpoint(tmp_path / "m", "llama"), tmp_path / "awq", AWQ)

A row of FORMATS each. See `quantised_writers` for what is in the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quantised_writers import (
    Write,
    awq_of,
    blocks_of,
    fp4_of,
    gptq_of,
    packed_of,
    rows_of_127,
    scaled_of,
    tensor_of,
)


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


def gptq_config(bits: int, group: int, **others: Any) -> dict[str, Any]:
    """As gptqmodel writes it."""
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, **others}


def compressed(format: str, *, targets: tuple[str, ...] = ("Linear",), **weights: Any) -> Any:  # noqa: A002
    """As the library writes it."""
    scheme = {"targets": list(targets), "weights": {"type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


AWQ = Written(
    {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
    awq_of(16),
)
_AUTO_ROUND = {"quant_method": "auto-round", "data_type": "int", "group_size": 32}
_FP8, _INT8 = torch.float8_e4m3fn, torch.int8
_ROW = {"strategy": "channel"}
_AO = ("_weight_qdata", "_weight_scale")


def _torchao(name: str) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_data": {}}}}


FORMATS = {
    "awq": AWQ,
    "gptq": Written(gptq_config(4, 32, desc_act=True), gptq_of(4, 32, is_shuffled=True)),
    "gptq-v2": Written(
        gptq_config(8, -1, checkpoint_format="gptq_v2"), gptq_of(8, -1, is_first=False)
    ),
    "gptq-3": Written(gptq_config(3, 32, format="gptq_v2"), gptq_of(3, 32, is_first=False)),
    "auto-round": Written(
        _AUTO_ROUND | {"bits": 4, "packing_format": "auto_round:auto_gptq", "sym": False},
        gptq_of(4, 32, has_order=False),
    ),
    "auto-round-awq": Written(
        _AUTO_ROUND | {"bits": 4, "packing_format": "auto_round:auto_awq"}, awq_of(32)
    ),
    "auto-round-mxfp4": Written(
        _AUTO_ROUND
        | {"bits": 4, "packing_format": "auto_round:llm_compressor", "data_type": "mx_fp"},
        fp4_of(32),
    ),
    "packed": Written(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
        packed_of(4, 32, has_zeros=False),
    ),
    "packed-zeros": Written(
        compressed("pack-quantized", num_bits=8, symmetric=False, **_ROW),
        packed_of(8, -1, has_zeros=True),
    ),
    "packed-order": Written(
        compressed("pack-quantized", num_bits=4, group_size=16, symmetric=False, actorder="group"),
        packed_of(4, 16, has_zeros=True, is_shuffled=True),
    ),
    "packed-3": Written(
        compressed("pack-quantized", num_bits=3, symmetric=False, **_ROW),
        packed_of(3, -1, has_zeros=True),
    ),
    "packed-3-loose": Written(
        compressed("pack-quantized", num_bits=3, symmetric=False, **_ROW),
        packed_of(3, -1, has_zeros=True, is_loose=True),
    ),
    "int8": Written(
        compressed("int-quantized", num_bits=8, symmetric=False, **_ROW),
        scaled_of(_INT8, 1, 0, zeros="weight_zero_point", rounded=torch.bfloat16),
    ),
    "fp8-row": Written(
        compressed("float-quantized", type="float", num_bits=8, **_ROW),
        scaled_of(_FP8, 1, 0, rounded=torch.bfloat16, extra={"input_scale": torch.ones(1)}),
    ),
    "fp8-tensor": Written(
        compressed("float-quantized", type="float", num_bits=8, strategy="tensor"),
        scaled_of(_FP8, 0, 0, rounded=torch.bfloat16),
    ),
    "fp8-block": Written(
        {"quant_method": "fp8", "weight_block_size": [40, 28], "activation_scheme": "dynamic"},
        scaled_of(_FP8, 40, 28, names=("weight", "weight_scale_inv"), of_scales=torch.float32),
    ),
    "fp8-powers": Written(
        {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
        scaled_of(
            _FP8, 32, 32, names=("weight", "weight_scale_inv"), of_scales=torch.float8_e8m0fnu
        ),
    ),
    "modelopt-fp8": Written(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        scaled_of(_FP8, 0, 0, of_scales=torch.float32, extra={"input_scale": torch.tensor(1.0)}),
    ),
    "nvfp4": Written(
        compressed("nvfp4-pack-quantized", type="float", num_bits=4, group_size=16),
        fp4_of(16),
    ),
    "modelopt-nvfp4": Written(
        {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 16}},
        fp4_of(16, is_modelopt=True),
    ),
    "mxfp4": Written(
        compressed("mxfp4-pack-quantized", type="float", num_bits=4, group_size=32),
        fp4_of(32),
    ),
    "nf4": Written({"load_in_4bit": True}, blocks_of("nf4", size=32)),
    "nf4-nested": Written(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        blocks_of("nf4", is_nested=True, size=32),
    ),
    "fp4-over-rows": Written(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        blocks_of("fp4", is_nested=True),
    ),
    "llm-int8": Written({"quant_method": "bitsandbytes", "load_in_8bit": True}, rows_of_127),
    "torchao-int8": Written(
        _torchao("Int8WeightOnlyConfig"),
        scaled_of(_INT8, 1, 0, names=_AO, of_scales=torch.float32, zeros="_weight_zero_point"),
    ),
    "torchao-fp8": Written(
        _torchao("Float8WeightOnlyConfig"),
        scaled_of(_FP8, 1, 0, names=_AO, of_scales=torch.float32),
    ),
}
