"""compressed-tensors: groups of modules, each with its own format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.quantised.scheme import (
    Layout,
    Matches,
    Quantisation,
    Scheme,
    matching,
)
from pdserve.shared.errors import ModelError

_FORMATS: Final[Mapping[str, tuple[Layout, frozenset[str]]]] = {  # and types of weights
    "pack-quantized": (Layout.PACKED, frozenset({"int"})),
    "int-quantized": (Layout.SCALED, frozenset({"int"})),
    "float-quantized": (Layout.SCALED, frozenset({"float"})),
    "naive-quantized": (Layout.SCALED, frozenset({"int", "float"})),
    "nvfp4-pack-quantized": (Layout.FP4, frozenset({"float"})),
    "mxfp4-pack-quantized": (Layout.FP4, frozenset({"float"})),
}
_FP4_INPUTS: Final = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}


def compressed_tensors(fields: JsonFields) -> Quantisation:
    """Raises ModelError: what it says is not read."""
    if fields.nested("transform_config").keys():
        raise fields.error("transform_config", "absent: rotations of activations are not computed")
    sparsity = fields.nested("sparsity_config")
    if sparsity.text("format", "dense") != "dense":
        raise sparsity.error("format", "'dense': sparse weights are not read")
    schemes: list[tuple[int, Matches, Scheme]] = []
    groups = fields.nested("config_groups")
    for name in groups.keys():  # noqa: SIM118
        group = groups.nested(name)
        if "weights" not in group:
            continue  # of activations alone
        scheme = _scheme(group, fields.text("format", ""))
        for target in group.texts("targets") or []:
            rank, matches = _target(target, group)
            schemes.append((rank, matches, scheme))
    if not schemes:
        raise fields.error("config_groups", "groups with targets and weights")
    schemes.sort(key=lambda each: each[0])
    return Quantisation(
        "compressed-tensors", tuple((each[1], each[2]) for each in schemes), fields.where
    )


def _target(target: str, group: JsonFields) -> tuple[int, Matches]:
    """What modules a target is for, and its rank: names, then patterns, then classes."""
    if target.startswith("re:"):
        return 1, matching(target.removeprefix("re:"), group.where)
    if target == "Linear":
        return 2, lambda module: not module.endswith("embed_tokens")
    if target == "Embedding":
        return 2, lambda module: module.endswith("embed_tokens")
    return 0, lambda module: module == target


def _scheme(group: JsonFields, default: str) -> Scheme:
    weights, found = group.nested("weights"), group.text("format", default)
    if found not in _FORMATS:
        raise ModelError(
            f"{group.where}: the format {found!r} is not read; read are {', '.join(_FORMATS)}"
        )
    layout, types = _FORMATS[found]
    kind = weights.text("type", "int").lower()
    if kind not in types:
        raise weights.error("type", f"{' or '.join(sorted(types))} in the format {found}")
    bits = weights.integer("num_bits", 8)
    allowed = {Layout.PACKED: range(2, 9), Layout.FP4: range(4, 5)}.get(
        layout, range(8, 9) if kind == "float" else range(2, 9)
    )
    if bits not in allowed:
        raise weights.error("num_bits", f"one of {', '.join(map(str, allowed))} in {found}")
    shape = _GROUPS.get(_strategy(weights))
    if shape is None:
        raise weights.error("strategy", f"one of {', '.join(_GROUPS)}")
    size = shape(weights)
    if layout is Layout.FP4 and size != (1, _FP4_INPUTS[found]):
        raise weights.error("group_size", f"{_FP4_INPUTS[found]} in {found}")
    is_symmetric = weights.boolean("symmetric", True)
    return Scheme(layout, bits, size, is_symmetric, is_float=kind == "float", rounds=True)


def _strategy(weights: JsonFields) -> str:
    if "strategy" in weights:
        return weights.text("strategy").lower()
    if "block_structure" in weights:
        return "block"
    if "group_size" not in weights:
        return "tensor"
    return "channel" if weights.integer("group_size", minimum=-1) == -1 else "group"


def _of_group(weights: JsonFields) -> tuple[int, int]:
    return 1, weights.integer("group_size")


def _of_block(weights: JsonFields) -> tuple[int, int]:
    sizes = weights.integers("block_structure") or []
    if len(sizes) != 2 or min(sizes) < 1:
        raise weights.error("block_structure", "two whole numbers from 1 up, as in [128, 128]")
    return sizes[0], sizes[1]


_GROUPS: Final[Mapping[str, Callable[[JsonFields], tuple[int, int]]]] = {
    "tensor": lambda _: (0, 0),
    "channel": lambda _: (1, 0),
    "group": _of_group,
    "tensor_group": _of_group,
    "block": _of_block,
}
