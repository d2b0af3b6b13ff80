"""What of `kv_memory` drafts have: the KV of a draft model, of a head, or of MTP layers."""

from __future__ import annotations

from typing import Final, NamedTuple

from pdserve.engine.drafts.heads.eagle3 import parse_eagle3
from pdserve.engine.models.config import ModelConfig, load_model_config
from pdserve.engine.plan.forms import ActivationDtype
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.shared.errors import ConfigError

MTP: Final = "mtp"  # the name of the checkpoint's own layers
KV_SHARE: Final = 8  # one of so many bytes, at most


class DraftKv(NamedTuple):
    """Of all KV memory: bytes that drafts have, and tokens for which these have room."""

    num_bytes: int
    num_tokens: int


def share_of_drafts(kv_bytes: int, named: str, model: ModelConfig) -> int:
    """Return how many bytes drafts may have; an MTP layer has no more than one of the model's."""
    most, further = kv_bytes // KV_SHARE, model.num_further_layers
    if named != MTP:
        return most
    return min(most, kv_bytes * further // (model.num_layers + further))


def draft_kv(kv_bytes: int, named: str, model: ModelConfig, dtype: KvDtype) -> DraftKv:
    """Return what drafts have of it.

    Args:
        kv_bytes: all KV memory.
        named: as speculation.model.
        model: that is served.
        dtype: of activations.

    Raises:
        ConfigError: the model has no such layer.
        ModelError: the draft model, or head, cannot be used.
    """
    num_bytes = share_of_drafts(kv_bytes, named, model)
    if named == MTP:
        if not model.num_further_layers:
            raise ConfigError(f"draft {MTP}: the model has no layer that predicts further tokens")
        layer_bytes = model.kv_layout(1, dtype).token_bytes // model.num_layers
        token_bytes = model.num_further_layers * layer_bytes
    else:
        checkpoint = resolve_checkpoint(named, None, with_weights=False)
        if (values := checkpoint.config()).get("speculators_model_type"):
            token_bytes = parse_eagle3(values, named).layout(ActivationDtype.FLOAT32).token_bytes
        else:
            token_bytes = load_model_config(checkpoint).kv_layout(1, dtype).token_bytes
    return DraftKv(num_bytes, num_bytes // token_bytes)
