"""The forward pass of a step on a GPU: products by cuBLAS, attention by a backend, the rest fused.

The residual stream is float32; the inputs of products and attention have the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdserve.engine.attention.interface import AttentionBatch
from pdserve.engine.cuda.experts import mix_experts
from pdserve.engine.cuda.rows import Rotation, add_rms_norm, rotate_and_write, silu_mul
from pdserve.engine.experts import Experts
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.parameters import DecoderWeights, LayerWeights
from pdserve.engine.models.vocabulary import Vocabulary
from pdserve.engine.ranks.collectives import ALONE, Collectives
from pdserve.engine.rope import Rope
from pdserve.engine.steps.batch import WantedStates


class Attend(Protocol):
    """A function like AttentionBackend.attend."""

    def __call__(
        self,
        query: Tensor,
        kv_pool: Tensor,
        layer: int,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """Return [num_tokens, num_heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's tensors, all on the GPU."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    attention: AttentionBatch
    sampled_rows: Tensor | None  # [num_sampled] int64; None for every row, in order
    states: WantedStates | None = None


class Forward:
    """The layers of one model. Only launches kernels; waits for the GPU only to return states."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, ranks: Collectives = ALONE
    ) -> None:
        self._config = config
        self._weights = weights
        self._ranks = ranks
        self._vocabulary = Vocabulary(config, weights, ranks)
        self._rope = Rope(config.rope, config.head_dim, weights.embedding.device)
        self._scale = config.head_dim**-0.5

    @property
    def num_columns(self) -> int:
        """Columns of what `logits` returns: vocab_size on rank 0."""
        return self._vocabulary.num_columns

    def logits(
        self,
        inputs: StepInputs,
        kv_pool: Tensor,
        attend: Attend,
        progress: LayerProgress | None = None,
    ) -> Tensor | None:
        """Launch one step.

        Returns:
            [num_sampled, num_columns] in the model's dtype; None if nothing is sampled.
        """
        weights, eps = self._weights, self._config.rms_norm_eps
        residual = self._vocabulary.embed(inputs.token_ids).float()
        cos, sin = self._rope.cos_sin(inputs.positions, torch.float32)
        delta: Tensor | None = None  # what the previous layer adds to the residual
        for index, layer in enumerate(weights.layers):
            normed = add_rms_norm(residual, delta, layer.attention_norm, eps)
            rotation = Rotation(cos, sin, layer.qk_norm, eps)
            slots = inputs.attention.slot_mapping
            query = rotate_and_write(layer.qkv(normed), rotation, slots, kv_pool, index)
            attended = attend(
                query,
                kv_pool,
                index,
                inputs.attention,
                scale=self._scale,
                sliding_window=self._config.sliding_windows[index],
            )
            delta = self._ranks.all_reduce(layer.attention_out(attended.flatten(1)))
            if progress is not None and index + 1 in progress.ends:
                progress.done(index + 1)  # the ranks have met: all have written their heads
            delta = self._ranks.all_reduce(self._mlp(layer, residual, delta))
        if inputs.states is not None:
            rows = inputs.states.rows.to(residual.device)
            inputs.states.out.copy_(self._final(residual, delta, rows))  # waits for the GPU
        return self._sampled(residual, delta, inputs.sampled_rows)

    def _mlp(self, layer: LayerWeights, residual: Tensor, delta: Tensor) -> Tensor:
        normed = add_rms_norm(residual, delta, layer.mlp_norm, self._config.rms_norm_eps)
        if isinstance(layer.mlp, Experts):
            return mix_experts(normed, layer.mlp)
        return layer.mlp.down(silu_mul(layer.mlp.gate_up(normed)))

    def _sampled(
        self, residual: Tensor, delta: Tensor | None, sampled_rows: Tensor | None
    ) -> Tensor | None:
        if sampled_rows is not None and len(sampled_rows) == 0:
            return None
        return self._vocabulary.logits(self._final(residual, delta, sampled_rows))

    def _final(self, residual: Tensor, delta: Tensor | None, rows: Tensor | None) -> Tensor:
        """Return the states after the last norm: [num rows, hidden_size] in the model's dtype."""
        if rows is not None:
            residual = residual[rows]
            delta = None if delta is None else delta[rows]
        eps = self._config.rms_norm_eps
        return add_rms_norm(residual, delta, self._weights.final_norm, eps)
