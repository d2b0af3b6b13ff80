"""What a head computes with on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pdserve.engine.attention.interface import AttentionBackend
from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.cuda.attention.catalog import triton_missing
from pdserve.engine.cuda.copies.staging import CudaCopies, Staging
from pdserve.engine.steps.batch import Batch


def on_device(device: torch.device) -> tuple[AttentionBackend, Callable[[Batch], Batch]]:
    """Return attention on a GPU, and what uploads a batch to it in one copy."""
    upload = Staging(CudaCopies(device)).upload
    if triton_missing() is not None:
        return ReferenceAttention(), upload
    from pdserve.engine.cuda.attention.triton_attention import TritonAttention

    return TritonAttention(), upload
