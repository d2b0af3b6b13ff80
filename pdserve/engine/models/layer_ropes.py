"""Which rotary embedding each layer has. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.rope_config import RopeConfig, RopeType, parse_rope, rope_of
from pdserve.engine.models.windows import Windows
from pdserve.shared.errors import UnsupportedRope

Ropes: TypeAlias = tuple[RopeConfig | None, ...]  # of each layer; None: it does not rotate
# (config.json, windows of the layers, max_position_embeddings, the architecture's theta)
RopeRule: TypeAlias = Callable[[JsonFields, Windows, int, float], Ropes]


def same_rope(fields: JsonFields, windows: Windows, max_positions: int, theta: float) -> Ropes:
    """All layers have one."""
    return (parse_rope(fields, max_positions, theta),) * len(windows)


def rope_if_window(fields: JsonFields, windows: Windows, max_positions: int, theta: float) -> Ropes:
    """Layers without a window do not rotate."""
    rope = parse_rope(fields, max_positions, theta)
    return tuple(None if window is None else rope for window in windows)


def rope_if_asked(fields: JsonFields, windows: Windows, max_positions: int, theta: float) -> Ropes:
    """All layers rotate if position_embedding_type says so, else none does."""
    if "position_embedding_type" not in fields:
        return (None,) * len(windows)
    if (kind := fields.text("position_embedding_type")) not in ("rope", "nope"):
        raise fields.error("position_embedding_type", "rope, nope or null")
    return (parse_rope(fields, max_positions, theta) if kind == "rope" else None,) * len(windows)


def rope_but_every(nth: int) -> RopeRule:
    """All layers but every nth rotate, or those that have a 1 in no_rope_layers."""

    def ropes(fields: JsonFields, windows: Windows, max_positions: int, theta: float) -> Ropes:
        rope, num_layers = parse_rope(fields, max_positions, theta), len(windows)
        period = fields.integer("no_rope_layer_interval", nth)
        rotates = fields.integers("no_rope_layers")
        if rotates is None:
            rotates = [int((layer + 1) % period != 0) for layer in range(num_layers)]
        if len(rotates) != num_layers or set(rotates) - {0, 1}:
            raise fields.error("no_rope_layers", f"a list of {num_layers}, of 1 (rotates) and 0")
        return tuple(rope if one else None for one in rotates)

    return ropes


def rope_by_window(local_theta: float | None = None) -> RopeRule:
    """Layers with a window have one of their own, with this theta if config.json has no other.

    None is that of the others. Either rope_parameters has an object for both kinds of layers, or as
    before transformers 5 rope_local_base_freq is of layers with a window, and all else of the
    others.
    """

    def ropes(fields: JsonFields, windows: Windows, max_positions: int, theta: float) -> Ropes:
        kinds = fields.nested("rope_parameters")
        theta = fields.number("rope_theta", theta, above=0.0)
        own_theta = fields.number("rope_local_base_freq", local_theta or theta, above=0.0)
        if "full_attention" in kinds or "sliding_attention" in kinds:
            if "rope_scaling" in fields:
                raise fields.error("rope_scaling", "absent, as rope_parameters has it")
            if unknown := set(kinds.keys()) - {"full_attention", "sliding_attention"}:
                raise UnsupportedRope(f"{kinds.where}: {', '.join(unknown)} is not supported")
            whole = rope_of(kinds.nested("full_attention"), fields, max_positions, theta)
            local = rope_of(kinds.nested("sliding_attention"), fields, max_positions, own_theta)
        else:
            whole = parse_rope(fields, max_positions, theta)
            local = RopeConfig(RopeType.DEFAULT, own_theta, max_positions)
        # Here, max_position_embeddings counts what a factor stretches to.
        whole, local = (replace(rope, max_model_len=max_positions) for rope in (whole, local))
        return tuple(whole if window is None else local for window in windows)

    return ropes
