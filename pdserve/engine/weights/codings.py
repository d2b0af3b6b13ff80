"""Which tensors of a checkpoint are coded, and how, as known before they are read. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdserve.engine.weights.gguf_parts import find_parts
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.model_files.coding import Coding


def stored_codings(checkpoint: Checkpoint, names: Iterable[str]) -> Mapping[str, Coding]:
    """Return those of the tensors of these names."""
    if checkpoint.gguf is None:
        return {}
    parts = find_parts(checkpoint.gguf, names)
    return {name: part.coding for name, part in parts.items() if part.coding is not None}
