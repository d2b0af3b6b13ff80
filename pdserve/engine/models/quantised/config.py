"""Reads how a checkpoint is quantised, from config.json or the files that older writers made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.quantised.auto_round import auto_round
from pdserve.engine.models.quantised.compressed import compressed_tensors
from pdserve.engine.models.quantised.floats import fp8, modelopt, mxfp4
from pdserve.engine.models.quantised.integers import awq, gptq
from pdserve.engine.models.quantised.libraries import bitsandbytes, torchao
from pdserve.engine.models.quantised.scheme import Quantisation
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.model_files.stored_types import described, stored_types
from pdserve.shared.errors import ModelError

_KEYS: Final = ("quantization_config", "compression_config")
# Files of which each is read where config.json says nothing, and the method that wrote it.
SIDE_FILES: Final[Mapping[str, str]] = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
# A row for each library.
METHODS: Final[Mapping[str, Callable[[JsonFields], Quantisation]]] = {
    "awq": awq,
    "gptq": gptq,
    "auto-round": auto_round,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "modelopt": modelopt,
    "mxfp4": mxfp4,
    "bitsandbytes": bitsandbytes,
    "torchao": torchao,
}


def parse_quantisation(fields: JsonFields) -> Quantisation | None:
    """Return what config.json says; None: nothing.

    Raises:
        ModelError: a field is wrong, or names what is not read.
    """
    key = next((key for key in _KEYS if fields.raw(key)), None)
    return None if key is None else _parse(fields.nested(key), fields)


def quantisation_of(checkpoint: Checkpoint) -> Quantisation | None:
    """Return how a checkpoint is quantised; None: it is not, or it is a GGUF file.

    Raises:
        ModelError: as parse_quantisation.
    """
    if not checkpoint.path.is_dir():
        return None
    config = JsonFields(checkpoint.config(), str(checkpoint.path / "config.json"))
    found = parse_quantisation(config)
    if found is not None:
        return found
    for name, method in SIDE_FILES.items():
        if (content := checkpoint.read_json(name)) is not None:
            where = str(checkpoint.path / name)
            return _parse(JsonFields({"quant_method": method} | content, where), config)
    return None


def weights_described(checkpoint: Checkpoint) -> str:
    """What the weights are stored as, for people: gptq: 4 bits by 128 in 7 I32 (3.5 MiB), ...

    Raises:
        ModelError: a file is damaged, or as parse_quantisation.
    """
    types, quantisation = described(stored_types(checkpoint)), quantisation_of(checkpoint)
    return types if quantisation is None else f"{quantisation} in {types}"


def _parse(fields: JsonFields, config: JsonFields) -> Quantisation:
    loads = any(key.startswith("load_in_") for key in fields.keys())  # noqa: SIM118
    method = fields.text("quant_method", "bitsandbytes" if loads else None)
    if method not in METHODS:
        raise ModelError(
            f"{fields.where}: quant_method {method!r} is not read; "
            f"read are {', '.join(METHODS)}: name the model that it was made from"
        )
    dtype = config.text("dtype", config.text("torch_dtype", "float32"))
    return replace(METHODS[method](fields), dtype=dtype)
