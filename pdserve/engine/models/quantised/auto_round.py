"""auto-round, which packs as other libraries do, and says so in a config of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.quantised.integers import awq, gptq, group_size
from pdserve.engine.models.quantised.scheme import (
    Layout,
    Matches,
    Quantisation,
    Scheme,
    every,
    matching,
)

_UNQUANTISED: Final = 16  # bits


def auto_round(fields: JsonFields) -> Quantisation:
    """Raises ModelError: what it says is not read."""
    if fields.nested("rotation_config").keys():
        raise fields.error("rotation_config", "absent: rotations of activations are not computed")
    packing, kind = fields.text("packing_format"), fields.text("data_type", "int")
    if (packing, kind) not in _PACKINGS:
        read = ", ".join(f"{packing} of {kind}" for packing, kind in _PACKINGS)
        raise fields.error("packing_format", f"of the data_type {kind!r}, one of: {read}")
    found = _PACKINGS[packing, kind](fields)
    own: list[tuple[Matches, Scheme]] = []
    extra = fields.nested("extra_config")
    for name in extra.keys():  # noqa: SIM118
        scheme = _own(extra.nested(name), found.schemes[-1][1])
        if scheme is not None:
            own.append((matching(f"(?:{name})$", extra.where), scheme))
    return replace(found, method="auto-round", schemes=(*own, *found.schemes))


def _mxfp4(fields: JsonFields) -> Quantisation:
    for key, value in (("bits", 4), ("group_size", 32)):
        if fields.integer(key) != value:
            raise fields.error(key, f"{value} in MXFP4")
    scheme = Scheme(Layout.FP4, 4, (1, 32), is_float=True, rounds=True)
    return Quantisation("auto-round", ((every, scheme),), fields.where)


def _own(fields: JsonFields, default: Scheme) -> Scheme | None:
    """How some modules are stored; None: not quantised."""
    bits = fields.integer("bits", default.bits)
    if bits >= _UNQUANTISED:
        return None
    allowed = (2, 3, 4, 8) if default.layout is Layout.GPTQ else (4,)
    if bits not in allowed:
        raise fields.error("bits", f"one of {', '.join(map(str, allowed))}, or {_UNQUANTISED}")
    size = group_size(fields, "group_size", default.group[1] or -1)
    return replace(default, bits=bits, group=(1, size))


_PACKINGS: Final[Mapping[tuple[str, str], Callable[[JsonFields], Quantisation]]] = {
    ("auto_round:auto_gptq", "int"): gptq,
    ("auto_round:auto_awq", "int"): awq,
    ("auto_round:llm_compressor", "mx_fp"): _mxfp4,
}
