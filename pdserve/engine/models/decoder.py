"""The interface between the engine and the model that computes a step.

Three implementations: `NativeDecoder` (C++ kernels, one call per step, CPU), `CudaDecoder` (Triton
kernels and CUDA graphs) and `TorchDecoder` (plain torch, any device, the oracle of the others).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pdserve.engine.adapters.adapter import Adapter
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.sampling.interface import Sampler
from pdserve.engine.steps.batch import Batch


class Decoder(Protocol):
    """Computes logits and final states from token ids; reads and writes the KV pool."""

    @property
    def config(self) -> ModelConfig:
        """The architecture."""

    @property
    def device(self) -> torch.device:
        """Device of the weights, on which the KV pool must be as well."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations; of KV, too, unless the pool has codes."""

    @property
    def most_ahead(self) -> int:
        """Rows of the largest step of decodes that can run ahead of the host; 0: none can.

        Up to that many, `logits` and `StepSampling.launch` only launch the step, and wait for
        nothing, not even the step before, whose tokens it may take (`Batch.sampled_before`).
        """

    @property
    def sampler(self) -> Sampler:
        """What chooses tokens from the logits, where they are."""

    def take_adapter(self, adapter: Adapter) -> None:
        """Make an adapter ready for steps, by its digest. Any thread may call it, beside steps.

        Raises:
            AdapterRefused: this decoder computes no adapters, or none such.
        """

    def drop_adapter(self, digest: str) -> None:
        """Forget one, which no later step has."""

    def logits(
        self, batch: Batch, kv_pool: Tensor, progress: LayerProgress | None = None
    ) -> Tensor | None:
        """Compute one step, and write its keys and values into the pool.

        The final states (hidden states after the last norm) of the rows in `batch.states` are
        written when this returns.

        Args:
            batch: the step's rows, on the host; token ids below vocab_size, sampled rows ascending.
            kv_pool: [num_blocks, *layout.block_shape], as `KvCache.pool`.
            progress: told of its layers when their keys and values have been written (on a GPU:
                when the kernel that writes them has been launched).

        Returns:
            [num_sampled, vocab_size] float32, the next-token logits of `batch.sampled_rows`; None
            if nothing is sampled. Valid until the next call; the caller may modify it.
        """
