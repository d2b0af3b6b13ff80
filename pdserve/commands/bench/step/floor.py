"""The lower bound of a step's time: reading its memory once, or doing its arithmetic.

    floor_s = max(bytes / read bandwidth, FLOPs / rate of matrix products)

Counts the necessary work, not what a particular decoder does; everything once:

* bytes: every weight of the linear layers, with scales if quantised (of experts, those of as many
  as the rows choose on average if they choose evenly), and the embedding row of each token; keys
  and values of each token that a request's queries attend to, once per layer, whether they existed
  before (read) or are new (written); float32 logits of the sampled rows, once.
* FLOPs: 2 per weight and row (of experts, those that the row chooses), and 4 * head_dim per head,
  query and key that it attends to (with latent attention 2 for each number of a latent row, and of
  its vector). In the last layer only keys and values are needed for all rows; everything else, like
  the logits, only for sampled rows.
* of a layer with a state: each request's is read and written, and each row takes 6 FLOPs for each
  number of it.

Activations, norms and sampling count as nothing. Arithmetic on quantised weights counts at the rate
of the activations' type, because activations are not quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pdserve.engine.models.recurrent import CHUNK
from pdserve.engine.plan.forms import ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.plan.sizes import bytes_read, kv_weights, row_weights
from pdserve.kv import KvDtype
from pdserve.measured.perf_model import StepRow

_LOGIT_BYTES = _STATE_NUMBER_BYTES = 4  # float32
_STATE_FLOPS = 6  # of a number of a state and a token: what is known, what is new, what is made


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


class StepWork:
    """The work of any step of one model."""

    def __init__(self, plan: ModelPlan, dtype: ActivationDtype, kv_dtype: KvDtype) -> None:
        """Count for the whole of a model; `dtype`: of its embedding."""
        assert plan.lm_head is not None, "all stages are counted"
        self._layers = plan.layers
        self._output = plan.lm_head
        self._config = plan.config
        self._row_bytes = plan.config.hidden_size * dtype.itemsize
        if plan.table is not None:
            self._row_bytes = plan.table.num_bytes // plan.table.num_out
        shape = plan.config.recurrent
        self._matrix_bytes = 0 if shape is None else shape.matrix_bytes  # of a request
        self._with_kv = [layer for layer in plan.layers if layer.has_kv]
        self._token_bytes = sum(plane.layer_bytes for plane in plan.planes(kv_dtype))
        self._last_kv_weights = kv_weights(plan.layers[-1])
        self._row_weights = [row_weights(layer) for layer in plan.layers]

    def of(self, rows: Sequence[StepRow]) -> Work:
        """Return the work of one step; at least one of its rows must be sampled."""
        assert any(row.is_sampled for row in rows), "weights of the output are counted as read"
        return Work(self._bytes(rows), self._flops(rows))

    def _bytes(self, rows: Sequence[StepRow]) -> int:
        num_tokens = sum(row.num_tokens for row in rows)
        num_sampled = sum(row.is_sampled for row in rows)
        *layers, last = self._layers
        weights = sum(bytes_read(layer, num_tokens) for layer in layers)
        weights += bytes_read(last, num_sampled) + self._output.num_bytes
        kv_tokens = sum(_tokens_seen(row, layer.window) for row in rows for layer in self._with_kv)
        return (
            weights
            + num_tokens * self._row_bytes
            + kv_tokens * self._token_bytes
            + sum(self._of_state(row) for row in rows)
            + num_sampled * self._output.num_out * _LOGIT_BYTES
        )

    def _of_state(self, row: StepRow) -> int:
        """Bytes of matrices that a row moves: it reads them, and few tokens seldom write them."""
        return self._matrix_bytes + self._matrix_bytes * min(row.num_tokens, CHUNK) // CHUNK

    def _flops(self, rows: Sequence[StepRow]) -> int:
        num_tokens = sum(row.num_tokens for row in rows)
        num_sampled = sum(row.is_sampled for row in rows)
        *others, last = self._row_weights
        last_kv = self._last_kv_weights
        products = (sum(others) + last_kv) * num_tokens
        products += (last - last_kv + self._output.num_weights) * num_sampled
        last_layer = self._layers[-1]
        before = [layer for layer in self._with_kv if layer is not last_layer]
        pairs = sum(_pairs_seen(row, layer.window) for row in rows for layer in before)
        if last_layer.has_kv:
            pairs += sum(_last_pairs(row, last_layer.window) for row in rows if row.is_sampled)
        of_states = _STATE_FLOPS * num_tokens * self._matrix_bytes // _STATE_NUMBER_BYTES
        of_pairs = 2 * self._config.pair_dim * self._config.num_heads * pairs
        return 2 * products + of_pairs + of_states


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
