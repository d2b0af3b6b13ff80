"""The lower bound of a step's time: reading its memory once, or doing its arithmetic.

    floor_s = max(bytes / read bandwidth, FLOPs / rate of matrix products)

Counts the necessary work, not what a particular decoder does; everything once:

* bytes: every weight of the linear layers, with scales if quantised (of experts, those of as many
  as the rows choose on average if they choose evenly), and the embedding row of each token; keys
  and values of each token that a request's queries attend to, once per layer, whether they existed
  before (read) or are new (written); float32 logits of the sampled rows, once.
* FLOPs: 2 per weight and row (of experts, those that the row chooses), and 4 * head_dim per head,
  query and key that it attends to. In the last layer only keys and values are needed for all rows;
  everything else, like the logits, only for sampled rows.

Activations, norms and sampling count as nothing. Arithmetic on quantised weights counts at the rate
of the activations' type, because activations are not quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pdserve.engine.models.config import ModelConfig
from pdserve.kv import KvDtype
from pdserve.perf_model import StepRow

_LOGIT_BYTES = 4  # float32
_ROUTER_BYTES = 4  # float32
_SCALE_BYTES = 4  # float32, one for each output of an int8 matrix


class Limit(StrEnum):
    """Which resource determines a floor."""

    MEMORY = "memory"
    ARITHMETIC = "arithmetic"


@dataclass(frozen=True, slots=True)
class Work:
    """The necessary work of a step."""

    num_bytes: int
    num_flops: int


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates that the machine reaches."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, work: Work) -> float:
        """Return the least time of a step with this work."""
        return max(work.num_bytes / self.bytes_per_s, work.num_flops / self.flops_per_s)

    def limit(self, work: Work) -> Limit:
        """Return which of the two resources takes longer."""
        memory_s = work.num_bytes / self.bytes_per_s
        return Limit.MEMORY if memory_s >= work.num_flops / self.flops_per_s else Limit.ARITHMETIC


@dataclass(frozen=True, slots=True)
class _Matrices:
    """The weights of some linear layers, and the number of their outputs."""

    num_weights: int
    num_out: int


class StepWork:
    """The work of any step of one model."""

    def __init__(self, model: ModelConfig, dtype: KvDtype, *, is_int8: bool = False) -> None:
        """Count for one model; `dtype`: of KV, activations and, unless `is_int8`, weights."""
        hidden = model.hidden_size
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self._kv = _Matrices(2 * keys * hidden, 2 * keys)
        self._attention = _Matrices(2 * queries * hidden, queries + hidden)  # but for those
        self._mlp = _gated(hidden, model.intermediate_size)
        self._expert = _gated(hidden, model.experts.intermediate_size if model.experts else 0)
        self._output = _Matrices(model.vocab_size * hidden, model.vocab_size)
        self._model = model
        self._dtype = dtype
        self._is_int8 = is_int8

    def of(self, rows: Sequence[StepRow]) -> Work:
        """Return the work of one step; at least one of its rows must be sampled."""
        assert any(row.is_sampled for row in rows), "weights of the output are counted as read"
        return Work(self._bytes(rows), self._flops(rows))

    def _bytes(self, rows: Sequence[StepRow]) -> int:
        model = self._model
        num_tokens = sum(row.num_tokens for row in rows)
        num_sampled = sum(row.is_sampled for row in rows)
        layer = self._weight_bytes(self._kv) + self._weight_bytes(self._attention)
        last = model.num_layers - 1
        mlps = sum(
            self._mlp_bytes(index, num_tokens if index < last else num_sampled)
            for index in range(model.num_layers)
        )
        kv_tokens = sum(_tokens_seen(row, window) for row in rows for window in self._windows)
        token_bytes = 2 * model.num_kv_heads * model.head_dim * self._dtype.itemsize  # of a layer
        return (
            model.num_layers * layer
            + mlps
            + self._weight_bytes(self._output)
            + num_tokens * model.hidden_size * self._dtype.itemsize
            + kv_tokens * token_bytes
            + num_sampled * model.vocab_size * _LOGIT_BYTES
        )

    def _flops(self, rows: Sequence[StepRow]) -> int:
        model = self._model
        num_tokens = sum(row.num_tokens for row in rows)
        num_sampled = sum(row.is_sampled for row in rows)
        kv = self._kv.num_weights
        *others, rest = [
            self._attention.num_weights + self._mlp_weights(index)
            for index in range(model.num_layers)
        ]
        products = (model.num_layers * kv + sum(others)) * num_tokens
        products += (rest + self._output.num_weights) * num_sampled
        *first, last = self._windows
        pairs = sum(_pairs_seen(row, window) for row in rows for window in first)
        pairs += sum(_last_pairs(row, last) for row in rows if row.is_sampled)
        return 2 * products + 4 * model.head_dim * model.num_heads * pairs

    def _mlp_bytes(self, layer: int, num_rows: int) -> int:
        """Of the weights of a layer's MLP, or of those of its experts that some row chooses."""
        experts = self._model.experts_of(layer)
        if experts is None:
            return self._weight_bytes(self._mlp)
        missed = (1 - experts.num_chosen / experts.num_experts) ** num_rows
        chosen = round(experts.num_experts * (1 - missed) * self._weight_bytes(self._expert))
        return chosen + experts.num_experts * self._model.hidden_size * _ROUTER_BYTES

    def _mlp_weights(self, layer: int) -> int:
        """Number of those that a row is multiplied by."""
        experts = self._model.experts_of(layer)
        if experts is None:
            return self._mlp.num_weights
        router = experts.num_experts * self._model.hidden_size
        return router + experts.num_chosen * self._expert.num_weights

    def _weight_bytes(self, matrices: _Matrices) -> int:
        if self._is_int8:
            return matrices.num_weights + _SCALE_BYTES * matrices.num_out
        return matrices.num_weights * self._dtype.itemsize

    @property
    def _windows(self) -> tuple[int | None, ...]:
        return self._model.sliding_windows


def _gated(hidden: int, inner: int) -> _Matrices:
    """Gate, up and down."""
    return _Matrices(3 * inner * hidden, 2 * inner + hidden)


def _tokens_seen(row: StepRow, window: int | None) -> int:
    """Number of tokens whose keys and values some query of the row attends to."""
    context = row.num_before + row.num_tokens
    return context if window is None else min(context, window + row.num_tokens - 1)


def _pairs_seen(row: StepRow, window: int | None) -> int:
    """Number of pairs of a query and a key that it attends to."""
    keys = np.arange(row.num_before + 1, row.num_before + row.num_tokens + 1)
    return int(keys.sum() if window is None else np.minimum(keys, window).sum())


def _last_pairs(row: StepRow, window: int | None) -> int:
    """Number of keys that the row's last query attends to."""
    context = row.num_before + row.num_tokens
    return context if window is None else min(context, window)
