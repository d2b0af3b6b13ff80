"""What KV in codes of 8 bits would save. Only said: formats are declared, never chosen."""

from __future__ import annotations

from math import ceil
from typing import Final

from msgspec.structs import replace

from pdserve.kv.layout import KvDtype, KvLayout

WORTHWHILE: Final = 1.15  # times the bytes: less is lost in what else a step does


def savings(layout: KvLayout, weight_bytes: int, batch: int, context: int) -> str:
    """Advise on the format of KV, in one line.

    Args:
        layout: of the KV.
        weight_bytes: of the same part of the model, which each decode step reads once.
        batch: streams that decode together.
        context: tokens of each.
    """
    if layout.dtype.is_coded:
        return f"kept as {layout.dtype}"
    coded, num_tokens = replace(layout, dtype=KvDtype.INT8), batch * context
    as_it_is = weight_bytes + num_tokens * layout.token_bytes
    gain = as_it_is / (weight_bytes + num_tokens * coded.token_bytes)
    room = layout.token_bytes / coded.token_bytes
    said = (
        f"decode steps of {batch} at {context} tokens would read {gain:.2f}x fewer bytes, and a "
        f"pool would hold {room:.2f}x the tokens"
    )
    return f"with --kv-dtype int8 {said}" if gain >= WORTHWHILE else f"leave it as it is: {said}"


def worthwhile_context(layout: KvLayout, weight_bytes: int, batch: int) -> int:
    """Return the tokens of context from which `savings` advises int8."""
    coded = replace(layout, dtype=KvDtype.INT8)
    saved = layout.token_bytes - WORTHWHILE * coded.token_bytes  # of a token, beyond what it takes
    return ceil(weight_bytes * (WORTHWHILE - 1) / (saved * batch))
