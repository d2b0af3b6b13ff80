"""The decoder on CPUs: a step is one call of the C++ decoder (csrc/decoder).

The call releases the interpreter lock, except while it reports layers. A row of logits depends, bit
for bit, only on that row and its request's KV: not on the rest of the batch, not on how its prompt
was split into chunks, and not on the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve import _native
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.native.weights import NativeWeights
from pdserve.engine.rope import inverse_frequencies
from pdserve.engine.steps.batch import Batch


class NativeDecoder:
    """Decoder on packed weights. Its threads are set by `_native.set_num_threads`."""

    def __init__(self, config: ModelConfig, weights: NativeWeights, variant: str = "") -> None:
        """Check that the weights are consistent, and keep them.

        Args:
            config: the architecture.
            weights: its weights; their memory is read at every step, and may be mapped read-only.
            variant: a kernel build of `_native.kernel_variants()`; "" is the best this CPU can run.

        Raises:
            ValueError: the weights are those of another architecture.
        """
        self.config = config
        self.device = torch.device("cpu")
        self.dtype = weights.embedding.dtype
        self._decoder = _native.Decoder(
            weights,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.rms_norm_eps,
            sliding_windows=[window or 0 for window in config.sliding_windows],
            inverse_frequencies=inverse_frequencies(config.rope, config.head_dim),
            rope_scale=config.rope.attention_factor,
            variant=variant,
        )
        self._logits = torch.empty(0, config.vocab_size)  # grows to the most rows ever sampled

    @property
    def workspace_bytes(self) -> int:
        """Size of the memory for activations: what the largest step so far has needed."""
        return self._decoder.workspace_bytes

    def logits(
        self, batch: Batch, kv_pool: Tensor, progress: LayerProgress | None = None
    ) -> Tensor | None:
        """See Decoder.logits.

        Raises:
            ValueError: a token id, a row, a block id or a length is out of range.
        """
        num_sampled = len(batch.sampled_rows)
        if num_sampled > len(self._logits):
            self._logits = torch.empty(num_sampled, self.config.vocab_size)
        logits = self._logits[:num_sampled]
        ends, done = ([], None) if progress is None else (list(progress.ends), progress.done)
        states = () if batch.states is None else (batch.states.rows, batch.states.out)
        self._decoder.logits(
            batch.token_ids,
            batch.attention.query_start,
            batch.attention.context_lens,
            batch.attention.block_tables,
            batch.sampled_rows,
            kv_pool,
            logits,
            ends,
            done,
            *states,
        )
        return logits if num_sampled else None
