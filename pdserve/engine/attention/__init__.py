"""Paged attention: one interface, native on CPUs, several kinds on GPUs, and a torch reference."""

from __future__ import annotations

import torch

from pdserve.engine.attention.interface import AttentionBackend, AttentionBatch
from pdserve.engine.attention.native import NativeAttention

__all__ = ["AttentionBackend", "AttentionBatch", "attention_backend"]


def attention_backend(device: torch.device) -> AttentionBackend:
    """Return the best backend for a device that works with any model: native on a CPU."""
    if device.type == "cpu":
        return NativeAttention()
    from pdserve.engine.cuda.catalog import choose_kind  # only where a GPU is asked for

    return choose_kind("", None).open(device)
