"""The seam between a step and the model that computes it.

Three implementations: `NativeDecoder` (C++ kernels, one call a step, CPU), `CudaDecoder` (Triton
kernels and CUDA graphs) and `TorchDecoder` (plain torch, any device, the oracle of the others).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pdserve.engine.batch import Batch
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.models.config import ModelConfig


class Decoder(Protocol):
    """Token ids in, logits and states out; reads and writes the KV pool on the way."""

    @property
    def config(self) -> ModelConfig:
        """The architecture."""

    @property
    def device(self) -> torch.device:
        """Where the weights are, and the KV pool must be."""

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and KV."""

    def logits(
        self, batch: Batch, kv_pool: Tensor, progress: LayerProgress | None = None
    ) -> Tensor | None:
        """Compute one step, and write its keys and values into the pool.

        The final states of the rows in `batch.states`, which are the hidden states behind the last
        norm, are there when this returns.

        Args:
            batch: the step's rows, on the host or on the device; token ids below vocab_size,
                sampled rows ascending.
            kv_pool: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
            progress: hears of its layers when their keys and values were written (on a GPU: when
                the kernel that writes them was launched).

        Returns:
            [num_sampled, vocab_size] float32, scores of every next token of `batch.sampled_rows`;
            None if nothing is sampled. Good until the next call, and the caller's to change.
        """
