"""Paged attention: one interface, a native CPU implementation and a torch reference."""

from __future__ import annotations

import torch

from pdserve.engine.attention.interface import AttentionBackend, AttentionBatch
from pdserve.engine.attention.native import NativeAttention
from pdserve.engine.attention.reference import ReferenceAttention

__all__ = ["AttentionBackend", "AttentionBatch", "attention_backend"]


def attention_backend(device: torch.device) -> AttentionBackend:
    """The best backend for a device: native on a CPU, plain torch elsewhere until CUDA kernels."""
    if device.type == "cpu":
        return NativeAttention()
    return ReferenceAttention()
