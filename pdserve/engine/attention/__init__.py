"""Paged attention: one interface, several kinds on GPUs, and a torch reference.

On CPUs the native decoder attends by itself.
"""

from __future__ import annotations

from pdserve.engine.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    LayerKv,
    WritingAttention,
)

__all__ = ["AttentionBackend", "AttentionBatch", "LayerKv", "WritingAttention"]
