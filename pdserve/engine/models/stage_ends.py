"""What comes before the layers of a pipeline stage, and behind them: the vocabulary, or a stage.

The residual stream goes from each rank of a stage to the same rank of the next one, part by part
(`steps/parts.py`). Behind all parts, rank 0 of the last stage sends logits to rank 0 of the first,
which samples; if there are none, it sends a sign: once that has come, all stages have written the
step's KV.

A send may wait for the receiver, and none waits in a circle: every stage takes part p before it
hands it on, and takes part p + 1 only then; the answer goes back when the first stage has handed on
all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pdserve.engine.adapters.adapter import Adapter
from pdserve.engine.adapters.torch_rows import Rows, of_sampled, rows_of
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.parameters import DecoderWeights
from pdserve.engine.models.vocabulary import Vocabulary
from pdserve.engine.ranks.collectives import ALONE, Collectives
from pdserve.engine.steps.batch import Batch, WantedStates
from pdserve.engine.steps.parts import in_parts
from pdserve.engine.steps.worst import LEAST_PART, num_parts


class Finals(NamedTuple):
    """Of a part of a step: states after the last norm, in the model's dtype. Of the last stage."""

    sampled: Tensor | None = None  # [num_sampled, hidden_size]; None: no row is sampled
    wanted: Tensor | None = None  # [num_states, hidden_size]; None: of no row


ComputePart: TypeAlias = Callable[[Batch, LayerProgress | None], Finals]  # also of a whole step


class StageEnds:
    """Those of one rank, in torch. Of a node without stages it has both ends: the vocabulary."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        residual_dtype: torch.dtype,
        ranks: Collectives = ALONE,
        least_part: int = LEAST_PART,
    ) -> None:
        """`config` is that of the whole model, `weights` are those of this rank."""
        self._config = config
        self._weights = weights
        self._vocabulary = Vocabulary(config, weights, ranks)
        self._residual_dtype = residual_dtype
        self._ranks = ranks
        self._least_part = least_part
        self.adapters: dict[str, Adapter] = {}  # by digest, all that steps may have
        self.leads = ranks.shard.rank == 0 and ranks.shard.is_first_stage  # and samples
        self.is_last = ranks.shard.is_last_stage

    @property
    def num_columns(self) -> int:
        """Columns of what a step returns here: vocab_size on rank 0 of the first stage."""
        if self.leads:
            return self._config.vocab_size
        return self._vocabulary.num_columns if self.is_last else 0

    def enter(self, token_ids: Tensor, adapted: Rows = ()) -> Tensor:
        """[num_tokens] int64 -> the residual stream [num_tokens, hidden_size] before the layers."""
        if self._ranks.shard.is_first_stage:
            return self._vocabulary.embed(token_ids, adapted).to(self._residual_dtype)
        shape = len(token_ids), self._config.hidden_size
        return self._ranks.receive(self._empty(*shape, dtype=self._residual_dtype))

    def hand_on(self, residual: Tensor) -> None:
        """Send the residual stream behind the layers to the next stage. Not of the last stage."""
        self._ranks.send(residual)

    def step(
        self, batch: Batch, compute: ComputePart, progress: LayerProgress | None
    ) -> Tensor | None:
        """Compute a step that is on the host, part by part; return its results."""
        num_stages = self._ranks.shard.num_stages
        count = num_parts(len(batch.token_ids), num_stages, self._least_part)
        *others, last = in_parts(batch, count)
        # A layer's keys and values are written when those of the last part are.
        parts = [*(compute(part, None) for part in others), compute(last, progress)]
        adapted = of_sampled(rows_of(batch, self.adapters), batch)
        return self.results(parts, len(batch.sampled_rows), batch.states, progress, adapted)

    def results(
        self,
        parts: Sequence[Finals],
        num_sampled: int,
        states: WantedStates | None,
        progress: LayerProgress | None,
        adapted: Rows = (),
    ) -> Tensor | None:
        """Make the results of a step of its parts; before the last stage: take what that makes.

        Returns:
            [num_sampled, num_columns] in the model's dtype; None if nothing is sampled.
        """
        if not self.is_last:
            return self._answer(num_sampled, progress)
        wanted = _joined(part.wanted for part in parts)
        if states is not None and wanted is not None:
            states.out.copy_(wanted)  # waits for a GPU
        return self._logits(_joined(part.sampled for part in parts), adapted)

    def gather_taps(self, layers: tuple[int, ...], rows: Tensor) -> None:
        """Bring what stages have copied out to rank 0 of the first one, behind a step's results.

        Args:
            layers: before which, of the whole model.
            rows: [num_sampled, num_taps, hidden_size]; this stage has written those of its layers.
        """
        shard = self._ranks.shard
        if shard.num_stages == 1:
            return
        if not shard.is_first_stage:
            earlier = self._ranks.receive(torch.empty_like(rows))
            first = shard.layers(self._config).start
            for place, layer in enumerate(layers):
                if layer < first:
                    rows[:, place] = earlier[:, place]
        if not self.is_last or shard.rank == 0:
            self._ranks.send(rows)
        if self.leads:
            self._ranks.receive(rows)

    def _answer(self, num_sampled: int, progress: LayerProgress | None) -> Tensor | None:
        """Take what the last stage has made of it. Returns the same as `results`."""
        if not self.leads:
            return self._empty(num_sampled, 0)
        logits = self._ranks.receive(self._empty(max(num_sampled, 1), self._width(num_sampled)))
        if progress is not None:
            for end in range(len(self._weights.layers) + 1, self._config.num_layers):
                progress.reached(end)
        return logits if num_sampled else None

    def _logits(self, states: Tensor | None, adapted: Rows = ()) -> Tensor | None:
        """[num_sampled, hidden_size] after the last norm -> [num_sampled, num_columns].

        The last stage sends them to the first, too. None is for nothing sampled.
        """
        logits = None if states is None else self._vocabulary.logits(states, adapted)
        shard = self._ranks.shard
        if shard.rank == 0 and not shard.is_first_stage:
            self._ranks.send(self._empty(1, self._width(0)) if logits is None else logits)
        return logits

    def _width(self, num_sampled: int) -> int:
        return self._config.vocab_size if num_sampled else 1  # a sign is one number

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self._weights.embedding.new_empty(shape, dtype=dtype)


def _joined(parts: Iterable[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if len(there) > 1 else next(iter(there), None)
