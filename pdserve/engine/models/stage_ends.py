"""What comes before the layers of a pipeline stage, and behind them: the vocabulary, or a stage.

The residual stream goes from each rank of a stage to the same rank of the next one. Rank 0 of the
last stage sends logits to rank 0 of the first, which samples; if there are none, it sends a sign:
once that has come, all stages have written the step's KV.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.parameters import DecoderWeights
from pdserve.engine.models.vocabulary import Vocabulary
from pdserve.engine.ranks.collectives import ALONE, Collectives


class StageEnds:
    """Those of one rank, in torch. Of a node without stages it has both ends: the vocabulary."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        residual_dtype: torch.dtype,
        ranks: Collectives = ALONE,
    ) -> None:
        """`config` is that of the whole model, `weights` are those of this rank."""
        self._config = config
        self._weights = weights
        self._vocabulary = Vocabulary(config, weights, ranks)
        self._residual_dtype = residual_dtype
        self._ranks = ranks
        self._leads = ranks.shard.rank == 0 and ranks.shard.is_first_stage
        self.is_last = ranks.shard.is_last_stage

    @property
    def num_columns(self) -> int:
        """Columns of what a step returns here: vocab_size on rank 0 of the first stage."""
        if self._leads:
            return self._config.vocab_size
        return self._vocabulary.num_columns if self.is_last else 0

    def enter(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> the residual stream [num_tokens, hidden_size] before the layers."""
        if self._ranks.shard.is_first_stage:
            return self._vocabulary.embed(token_ids).to(self._residual_dtype)
        shape = len(token_ids), self._config.hidden_size
        return self._ranks.receive(self._empty(*shape, dtype=self._residual_dtype))

    def hand_on(self, residual: Tensor) -> None:
        """Send the residual stream behind the layers to the next stage. Not of the last stage."""
        self._ranks.send(residual)

    def answer(self, num_sampled: int, progress: LayerProgress | None) -> Tensor | None:
        """Take what the last stage has made of it. Not of the last stage.

        Returns:
            [num_sampled, num_columns] in the model's dtype; None if nothing is sampled.
        """
        if not self._leads:
            return self._empty(num_sampled, 0)
        logits = self._ranks.receive(self._empty(max(num_sampled, 1), self._width(num_sampled)))
        if progress is not None:
            for end in range(len(self._weights.layers) + 1, self._config.num_layers):
                progress.reached(end)
        return logits if num_sampled else None

    def logits(self, states: Tensor | None) -> Tensor | None:
        """[num_sampled, hidden_size] after the last norm -> [num_sampled, num_columns].

        Of the last stage only, which sends them to the first, too. None is for nothing sampled.
        """
        logits = None if states is None else self._vocabulary.logits(states)
        shard = self._ranks.shard
        if shard.rank == 0 and not shard.is_first_stage:
            self._ranks.send(self._empty(1, self._width(0)) if logits is None else logits)
        return logits

    def _width(self, num_sampled: int) -> int:
        return self._config.vocab_size if num_sampled else 1  # a sign is one number

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self._weights.final_norm.new_empty(shape, dtype=dtype)
