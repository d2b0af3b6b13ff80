"""How many tokens the queries of each layer see, as config.json says it. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from pdserve.engine.models.json_fields import JsonFields
from pdserve.shared.errors import ModelError

Windows: TypeAlias = tuple[int | None, ...]  # of each layer, in tokens; None: all
WindowRule: TypeAlias = Callable[[JsonFields, int], Windows]  # (config.json, number of layers)

_KINDS = {"full_attention", "sliding_attention"}


def no_windows(fields: JsonFields, num_layers: int) -> Windows:
    """Raises ModelError: config.json asks for windows, which this architecture does not have."""
    if "sliding_window" in fields:
        raise ModelError(
            f"{fields.where}: sliding_window is {fields.raw('sliding_window')!r}, which this "
            "architecture does not have"
        )
    return (None,) * num_layers


def attention_only(fields: JsonFields, num_layers: int) -> Windows:
    """Of models that may have layers of another kind; these are refused."""
    for key in ("layer_types", "layers_block_type"):
        if set(fields.texts(key) or []) - {"attention", "full_attention"}:
            raise fields.error(key, "of attention alone: layers of other kinds are not served")
    return no_windows(fields, num_layers)


def same_window(fields: JsonFields, num_layers: int) -> Windows:
    """Mistral: absent means the default of the architecture, null means none."""
    window: int | None = 4096
    if fields.has_key("sliding_window"):
        window = fields.integer("sliding_window") if "sliding_window" in fields else None
    layer_types = set(fields.texts("layer_types") or [])
    if layer_types - {"full_attention" if window is None else "sliding_attention"}:
        raise ModelError(
            f"{fields.where}: layer_types contradicts sliding_window, which holds for all layers "
            "of this architecture"
        )
    return (window,) * num_layers


def window_if_set(fields: JsonFields, num_layers: int) -> Windows:
    """Mixtral: of all layers."""
    window = fields.integer("sliding_window") if "sliding_window" in fields else None
    return (window,) * num_layers


def window_if_used(fields: JsonFields, num_layers: int) -> Windows:
    """Qwen with experts: of all layers, if use_sliding_window says so."""
    return (_used_window(fields),) * num_layers


def _used_window(fields: JsonFields) -> int | None:
    is_null = fields.has_key("sliding_window") and "sliding_window" not in fields
    if is_null or not fields.boolean("use_sliding_window", False):
        return None
    return fields.integer("sliding_window", 4096)


def window_per_layer(fields: JsonFields, num_layers: int) -> Windows:
    """Qwen: of layer_types, or of those from max_window_layers on."""
    window = _used_window(fields)
    if "layer_types" in fields:
        return _of_types(fields, num_layers, window, "use_sliding_window and sliding_window")
    first = fields.integer("max_window_layers", 28, minimum=0)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def window_of_types(fields: JsonFields, num_layers: int) -> Windows:
    """Of layer_types alone: what holds without them changed between versions of transformers."""
    if _used_window(fields) is not None and "layer_types" not in fields:
        raise fields.error("layer_types", "there, since there are windows")
    return window_per_layer(fields, num_layers)


def window_but_every(nth: int, default: int = 4096) -> WindowRule:
    """All layers but every nth, or those that layer_types names; null means none."""

    def windows(fields: JsonFields, num_layers: int) -> Windows:
        is_null = fields.has_key("sliding_window") and "sliding_window" not in fields
        window = None if is_null else fields.integer("sliding_window", default)
        if "layer_types" in fields:
            return _of_types(fields, num_layers, window, "sliding_window")
        period = fields.integer("sliding_window_pattern", nth)
        return tuple(window if (n + 1) % period else None for n in range(num_layers))

    return windows


def _of_types(fields: JsonFields, num_layers: int, window: int | None, needed: str) -> Windows:
    layer_types = fields.texts("layer_types") or []
    if len(layer_types) != num_layers:
        raise fields.error("layer_types", f"a list of {num_layers}, one for each layer")
    if set(layer_types) - _KINDS or (window is None and "sliding_attention" in layer_types):
        raise fields.error("layer_types", f"of full_attention, and with {needed} sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
