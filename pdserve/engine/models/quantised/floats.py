"""FP8 with a scale for each block, as DeepSeek has it, and what modelopt writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.quantised.scheme import Layout, Quantisation, Scheme, every

_MODELOPT: Final[Mapping[str, Scheme]] = {  # by quant_algo
    "FP8": Scheme(Layout.SCALED, 8, (0, 0), is_float=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme(Layout.SCALED, 8, (1, 0), is_float=True),
    "NVFP4": Scheme(Layout.FP4, 4, (1, 16), is_float=True),
    "W4A16_NVFP4": Scheme(Layout.FP4, 4, (1, 16), is_float=True),
}


def fp8(fields: JsonFields) -> Quantisation:
    """Raises ModelError: what it says is not read."""
    if fields.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise fields.error("fmt", "'e4m3'")
    if fields.text("expert_dtype", "fp8") != "fp8":
        raise fields.error("expert_dtype", "'fp8'")
    sizes = fields.integers("weight_block_size") or [0, 0]
    if len(sizes) != 2 or (min(sizes) < 1 and sizes != [0, 0]):
        raise fields.error("weight_block_size", "two whole numbers from 1 up, or null")
    scheme = Scheme(Layout.SCALED, 8, (sizes[0], sizes[1]), is_float=True)
    return Quantisation("fp8", ((every, scheme),), fields.where)


def mxfp4(fields: JsonFields) -> Quantisation:
    """Return that of gpt-oss: its experts alone are quantised."""
    scheme = Scheme(Layout.FP4, 4, (1, 32), is_float=True, rounds=True)
    return Quantisation("mxfp4", ((every, scheme),), fields.where)


def modelopt(fields: JsonFields) -> Quantisation:
    """Raises ModelError: what it says is not read."""
    said = fields.nested("quantization") if "quantization" in fields else fields
    algorithm = said.text("quant_algo").upper()
    if algorithm not in _MODELOPT:
        raise said.error("quant_algo", f"one of {', '.join(_MODELOPT)}")
    scheme = _MODELOPT[algorithm]
    size = said.integer("group_size", scheme.group[1], minimum=0)
    if scheme.layout is Layout.FP4 and size != scheme.group[1]:
        raise said.error("group_size", f"{scheme.group[1]} with {algorithm}")
    return Quantisation("modelopt", ((every, scheme),), fields.where)
