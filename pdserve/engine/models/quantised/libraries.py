"""bitsandbytes and torchao, whose files say the most of how matrices are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.quantised.scheme import Layout, Quantisation, Scheme, every
from pdserve.shared.errors import ModelError

_TORCHAO: Final[Mapping[str, bool]] = {  # whether weights are floats
    "Int8WeightOnlyConfig": False,
    "Int8DynamicActivationInt8WeightConfig": False,
    "Int8StaticActivationInt8WeightConfig": False,
    "Float8WeightOnlyConfig": True,
    "Float8DynamicActivationFloat8WeightConfig": True,
    "Float8StaticActivationFloat8WeightConfig": True,
}


def bitsandbytes(fields: JsonFields) -> Quantisation:
    """Raises ModelError: what it says is not read."""
    has_4, has_8 = fields.boolean("load_in_4bit", False), fields.boolean("load_in_8bit", False)
    if has_4 == has_8:
        raise fields.error("load_in_4bit", "true, or else load_in_8bit")
    if has_4 and fields.text("bnb_4bit_quant_type", "fp4") not in ("nf4", "fp4"):
        raise fields.error("bnb_4bit_quant_type", "'nf4' or 'fp4'")
    scheme = Scheme(Layout.BITSANDBYTES_4, 4) if has_4 else Scheme(Layout.BITSANDBYTES_8, 8)
    return Quantisation("bitsandbytes", ((every, scheme),), fields.where)


def torchao(fields: JsonFields) -> Quantisation:
    """Raises ModelError: what it says is not read."""
    kinds = fields.nested("quant_type")
    default = kinds.nested("default")
    name = default.text("_type")
    if name not in _TORCHAO:
        raise ModelError(
            f"{default.where}: {name} is not read, as its layout may depend on the hardware that "
            f"it was made on; read are {', '.join(_TORCHAO)}"
        )
    scheme = Scheme(Layout.TORCHAO, 8, is_float=_TORCHAO[name])
    return Quantisation("torchao", ((every, scheme),), fields.where)
