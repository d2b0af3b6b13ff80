"""Where the vocabulary meets the layers: the embedding before them, the output matrix after them.

Tensor-parallel ranks have a range of the tokens each. A rank embeds those of its range, and the sum
over the ranks has all of them. Of logits it has the columns of its range, and only rank 0, which
samples, gets all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.adapters.adapter import TrainedTokens
from pdserve.engine.adapters.torch_rows import Rows, added
from pdserve.engine.layers import capped, embedding_factor
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.parameters import DecoderWeights
from pdserve.engine.ranks.collectives import ALONE, Collectives
from pdserve.engine.ranks.shard import Shard


class Vocabulary:
    """One rank's share of it, in torch."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, ranks: Collectives = ALONE
    ) -> None:
        shard = ranks.shard
        self._embedding = weights.embedding
        self._lm_head = weights.lm_head
        self._ranks = ranks
        self._cap = config.arithmetic.logit_cap
        self._scale = embedding_factor(config.arithmetic, weights.embedding.dtype)
        self._logit_scale = config.arithmetic.logit_scale
        self._own_tokens = shard.share(config.vocab_size)
        self._first_token = self._own_tokens.start
        shares = [
            Shard(r, shard.num_ranks).share(config.vocab_size) for r in range(shard.num_ranks)
        ]
        self._widths = [share.stop - share.start for share in shares]

    @property
    def num_columns(self) -> int:
        """Columns of what `logits` returns here."""
        rank = self._ranks.shard.rank
        return sum(self._widths) if rank == 0 else self._widths[rank]

    def embed(self, token_ids: Tensor, adapted: Rows = ()) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size] in the model's dtype."""
        rows = self._rows(token_ids)
        for adapter, own in _on(token_ids.device, adapted):
            ids = token_ids[own]
            if adapter.own_embedding is not None:
                rows[own] = adapter.own_embedding[ids].to(rows.dtype)
            elif adapter.embedding is not None:
                made = functional.linear(adapter.embedding.a.T[ids], adapter.embedding.b)
                rows[own] = (rows[own] + made).to(rows.dtype)
            if adapter.trained_embedding is not None:
                _replace(rows, own, ids, adapter.trained_embedding)
        return rows if self._scale == 1.0 else rows * self._scale

    def _rows(self, token_ids: Tensor) -> Tensor:
        if len(self._widths) == 1:
            return functional.embedding(token_ids, self._embedding)
        own = token_ids - self._first_token
        is_elsewhere = (own < 0) | (own >= len(self._embedding))
        rows = functional.embedding(own.masked_fill_(is_elsewhere, 0), self._embedding)
        return self._ranks.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0.0))

    def logits(self, states: Tensor, adapted: Rows = ()) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] in the model's dtype, on rank 0.

        The other ranks get the columns of their own tokens. `adapted`: rows of `states`.
        """
        columns = self._lm_head(states)
        for adapter, own in _on(states.device, adapted):
            if adapter.own_head is not None:
                own_head = adapter.own_head[self._own_tokens].to(states)
                columns[own] = functional.linear(states[own], own_head)
            elif adapter.head is not None:
                made = added(states[own].float(), adapter.head)[:, self._own_tokens]
                columns[own] = (columns[own] + made).to(columns.dtype)
            if adapter.trained_head is not None:
                trained = adapter.trained_head.within(self._own_tokens)
                places = torch.tensor(trained.ids, device=own.device) - self._first_token
                made = functional.linear(states[own], trained.rows.to(states))
                columns[own[:, None], places.long()] = made
        columns = columns if self._logit_scale == 1.0 else columns * self._logit_scale
        columns = capped(columns, self._cap)
        if len(self._widths) == 1:
            return columns
        missing = max(self._widths) - columns.shape[1]  # 0 or 1: gathered tensors have one shape
        parts = self._ranks.gather(functional.pad(columns, (0, missing)) if missing else columns)
        if not parts:
            return columns
        cut = [part[:, :width] for part, width in zip(parts, self._widths, strict=True)]
        return torch.cat(cut, dim=1)


def _on(device: torch.device, adapted: Rows) -> Rows:
    return [(adapter, own.to(device)) for adapter, own in adapted]


def _replace(rows: Tensor, own: Tensor, ids: Tensor, trained: TrainedTokens) -> None:
    """Embed an adapter's rows, which are `own`, as it has been trained to."""
    for token, row in zip(trained.ids, trained.rows, strict=True):
        rows[own[ids == token]] = row.to(rows)
