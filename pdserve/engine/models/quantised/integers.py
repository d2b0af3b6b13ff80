"""AWQ and GPTQ: weights of a few bits, packed into words."""

from __future__ import annotations

from typing import Final

from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.quantised.scheme import (
    Layout,
    Matches,
    Quantisation,
    Scheme,
    every,
    matching,
)

_GPTQ_BITS: Final = (2, 3, 4, 8)
_GPTQ_FORMATS: Final = ("gptq", "gptq_v2")


def awq(fields: JsonFields) -> Quantisation:
    """Raises ModelError: what it says is not read."""
    bits = fields.integer("bits" if "bits" in fields else "w_bit")
    if bits != 4:
        raise fields.error("bits" if "bits" in fields else "w_bit", "4: AWQ has no other layout")
    version = next((key for key in ("version", "format") if key in fields), "version")
    if fields.text(version, "gemm").lower() != "gemm":
        raise fields.error(version, "'gemm': other kernels order words differently; repack it")
    size = group_size(fields, "group_size" if "group_size" in fields else "q_group_size")
    fields.boolean("zero_point", True)  # writers store zero points of 8 where there are none
    return Quantisation("awq", ((every, Scheme(Layout.AWQ, 4, (1, size), False)),), fields.where)


def gptq(fields: JsonFields) -> Quantisation:
    """Raises ModelError: what it says is not read."""
    key = "checkpoint_format" if "checkpoint_format" in fields else "format"
    found = fields.text(key, "gptq")
    if found not in _GPTQ_FORMATS:
        raise fields.error(
            key, f"one of {', '.join(_GPTQ_FORMATS)}: save it so, with gptqmodel's format option"
        )
    if fields.boolean("is_marlin_format", False):
        raise fields.error("is_marlin_format", "false: words are ordered for one kernel; repack it")
    fields.boolean("desc_act", False)  # either way g_idx says which group an input is of
    is_first = found == "gptq"
    schemes: list[tuple[Matches, Scheme]] = []
    dynamic = fields.nested("dynamic")
    for rule in dynamic.keys():  # noqa: SIM118
        own = dynamic.nested(rule)
        text = rule.removeprefix("+:")
        if not rule.startswith("-:"):
            matches = matching(text, dynamic.where)
            schemes.append((matches, _gptq_scheme(own, is_first, fields)))
    return Quantisation(
        "gptq", (*schemes, (every, _gptq_scheme(fields, is_first, fields))), fields.where
    )


def group_size(fields: JsonFields, key: str, default: int | None = None) -> int:
    """How many inputs share a scale; 0: all of a row. Raises ModelError: it is no such number."""
    size = fields.integer(key, default, minimum=-1)
    if size == 0:
        raise fields.error(key, "a whole number from 1 up, or -1 for whole rows")
    return max(size, 0)


def _gptq_scheme(fields: JsonFields, is_first: bool, default: JsonFields) -> Scheme:
    source = fields if "bits" in fields else default
    bits = source.integer("bits")
    if bits not in _GPTQ_BITS:
        raise source.error("bits", f"one of {', '.join(map(str, _GPTQ_BITS))}")
    size = group_size(fields if "group_size" in fields else default, "group_size", 128)
    is_symmetric = fields.boolean("sym", default.boolean("sym", True))
    if is_first and bits == 3 and not is_symmetric:
        raise source.error(
            "bits", "2, 4 or 8 with checkpoint_format gptq, as writers differ in zero points of 3"
        )
    return Scheme(Layout.GPTQ, bits, (1, size), is_symmetric, is_first)
