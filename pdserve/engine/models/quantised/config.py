"""Reads how a checkpoint is quantised, from config.json or the files that older writers made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.quantised.integers import awq, gptq
from pdserve.engine.models.quantised.scheme import Quantisation
from pdserve.model_files.checkpoint import Checkpoint
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
}


def parse_quantisation(fields: JsonFields) -> Quantisation | None:
    """Return what config.json says; None: nothing.

    Raises:
        ModelError: a field is wrong, or names what is not read.
    """
    key = next((key for key in _KEYS if fields.raw(key)), None)
    return None if key is None else _parse(fields.nested(key))


def quantisation_of(checkpoint: Checkpoint) -> Quantisation | None:
    """Return how a checkpoint of safetensors is quantised; None: it is not.

    Raises:
        ModelError: as parse_quantisation.
    """
    path = checkpoint.path / "config.json"
    found = parse_quantisation(JsonFields(checkpoint.config(), str(path)))
    if found is not None:
        return found
    for name, method in SIDE_FILES.items():
        if (content := checkpoint.read_json(name)) is not None:
            where = str(checkpoint.path / name)
            return _parse(JsonFields({"quant_method": method} | content, where))
    return None


def _parse(fields: JsonFields) -> Quantisation:
    loads = any(key.startswith("load_in_") for key in fields.keys())  # noqa: SIM118
    method = fields.text("quant_method", "bitsandbytes" if loads else None)
    if method not in METHODS:
        raise ModelError(
            f"{fields.where}: quant_method {method!r} is not read; "
            f"read are {', '.join(METHODS)}: name the model that it was made from"
        )
    return METHODS[method](fields)
