"""One step of the model: plan in, sampled tokens out. The only part of the engine that computes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.engine.batch import Batch, build_batch
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.sampling import sample
from pdserve.lifecycle import Lifecycle
from pdserve.protocol import SamplingParams


class ModelRunner:
    """A model over a KV pool. Synchronous: called from a worker thread, one call at a time."""

    def __init__(
        self, model: Decoder, kv_cache: KvCache, eos_token_ids: frozenset[int] | None = None
    ) -> None:
        """Put a model and its pool together.

        Args:
            model: on the pool's device, and of its dtype.
            kv_cache: of the model's layout.
            eos_token_ids: tokens that `min_tokens` holds back; None: those of the model's config.
        """
        layout = model.config.kv_layout(kv_cache.layout.block_size, kv_cache.layout.dtype)
        assert layout == kv_cache.layout, "the pool was laid out for another model"
        assert kv_cache.pool.dtype == model.dtype, "model and pool have one dtype"
        self.model_s = 0.0  # spent in the model itself, over all steps
        self._model = model
        self._kv_cache = kv_cache
        self._eos_token_ids = model.config.eos_token_ids if eos_token_ids is None else eos_token_ids

    @torch.inference_mode()
    def execute(self, rows: Sequence[Scheduled]) -> list[SampledToken | None]:
        """Compute the rows' tokens, write their KV, and sample where a row reaches its end.

        Requests are only read, so the same plan can be executed again: a step that raised for one
        request leaves the others as they were, to be planned anew.

        Args:
            rows: whose requests have blocks for the tokens; no request twice.

        Returns:
            One entry per row, None where `row.samples` is false.

        Raises:
            UnusableLogits: the model's output for a request is no distribution; names which.
        """
        if not rows:
            return []
        batch = build_batch(rows, self._kv_cache.layout.block_size, self._model.device)
        logits = self._logits(batch)
        if logits is None:
            return [None] * len(rows)
        tokens = iter(sample(logits, batch.sampled_requests, self._eos_token_ids))
        return [next(tokens) if row.samples else None for row in rows]

    def _logits(self, batch: Batch) -> Tensor | None:
        """[num_sampled, vocab_size] float32, or None when no row of the batch is sampled from."""
        started_s = time.perf_counter()
        hidden = self._model.forward(
            batch.token_ids, batch.positions, batch.attention, self._kv_cache.pool
        )
        logits = self._model.logits(hidden[batch.sampled_rows]) if batch.sampled_requests else None
        self.model_s += time.perf_counter() - started_s
        return logits

    def warmup(self, num_tokens: int) -> None:
        """Compute one prompt of `num_tokens` tokens, so that the first request finds all ready.

        Overwrites the first blocks of the pool: for use before there is anything in it.
        """
        num_blocks = self._kv_cache.layout.blocks_for(num_tokens)
        assert num_blocks <= self._kv_cache.num_blocks, "a warmup fits into the pool"
        request = Request(
            request_id="warmup",
            prompt_token_ids=[0] * num_tokens,
            sampling=SamplingParams(temperature=0.0),
            lifecycle=Lifecycle(received_s=0.0),
            block_table=list(range(num_blocks)),
        )
        self.execute([Scheduled(request, num_tokens)])
