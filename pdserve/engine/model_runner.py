"""Computes one step of the model: from the step's plan to sampled tokens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pdserve.engine.grammar import GrammarProgress
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.prompt_results.fan_out import fan_in, fan_out
from pdserve.engine.prompt_results.pooling import pool, wanted_states
from pdserve.engine.prompt_results.scores import LOGITS_BYTES, is_scored, scored_parts
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.sampling.interface import Draws, StepSampling
from pdserve.engine.steps.batch import Batch
from pdserve.engine.steps.batches import StepBatches
from pdserve.errors import NodeSick
from pdserve.lifecycle import Lifecycle
from pdserve.protocol import SamplingParams


class ModelRunner:
    """Runs a model over a KV pool. Implements `pdserve.engine.interface.Runner`."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: KvCache,
        eos_token_ids: frozenset[int] | None = None,
        scored_logits_bytes: int = LOGITS_BYTES,
        grammars: GrammarProgress | None = None,
    ) -> None:
        """Combine a model with its KV pool.

        Args:
            model: on the pool's device, with the same dtype.
            kv_cache: with the model's layout, or this rank's part of it.
            eos_token_ids: tokens that `min_tokens` suppresses; None for those of the model config.
            scored_logits_bytes: maximum size of logits at a time, in steps that score prompts.
            grammars: computes the masks of answers that have a grammar.
        """
        layout = model.config.kv_layout(kv_cache.layout.block_size, kv_cache.layout.dtype)
        assert layout.model_shape == kv_cache.layout.model_shape, "the pool is of this model"
        assert kv_cache.pool.dtype == model.dtype, "model and pool have one dtype"
        self.model_s = 0.0  # total time spent in the model itself, over all steps
        self.batches = StepBatches(kv_cache.layout.block_size)
        self._model = model
        self._kv_cache = kv_cache
        self._scored_logits_bytes = scored_logits_bytes
        self._grammars = grammars or GrammarProgress()
        self._eos_token_ids = model.config.eos_token_ids if eos_token_ids is None else eos_token_ids

    def prepare(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> Callable[[], list[SampledToken | None]]:
        """Build the batch; return a function that computes it (`execute`), callable in any thread.

        The function must be called before the next step is prepared.
        """
        return partial(self._compute, rows, self.batches.lay_out(rows), progress)

    def foresee(self, rows: Sequence[Scheduled]) -> None:
        """Begin to build the batch of the step after this one, which may be running meanwhile."""
        self.batches.foresee(rows)

    def execute(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> list[SampledToken | None]:
        """Compute the rows' tokens, write their KV, and sample for each row that reaches its end.

        Requests are only read, so a plan can be executed again: if a step raises for one request,
        the others are unchanged and can be planned again. The exceptions are prompt scores and
        pooled states, where requested: these are written into the requests, and are not added a
        second time when the plan is repeated.

        Args:
            rows: their requests have blocks for the tokens; no request occurs twice.
            progress: told of layers whose KV is in the pool. On a GPU, nothing waits for a layer
                before the whole step has been launched.

        Returns:
            One entry per row, None where `row.samples` is false.

        Raises:
            RequestsFailed: the model's output for some requests is not a distribution, or their
                grammars cannot be followed; names these requests.
        """
        return self.prepare(rows, progress)() if rows else []

    @torch.inference_mode()
    def _compute(
        self, rows: Sequence[Scheduled], batch: Batch, progress: LayerProgress | None
    ) -> list[SampledToken | None]:
        try:
            return self._computed(rows, batch, progress)
        except NodeSick:
            raise  # a GPU that waits for another rank would do so for ever
        except Exception:
            with suppress(RuntimeError):  # what is wrong with the GPU is known already
                self._wait()
            raise

    def _wait(self) -> None:
        """Wait until the GPU is done: nothing writes to the blocks of the step any more.

        Once a step is over, its KV is announced, and its blocks may be given to others.
        """
        if self._model.device.type == "cuda":
            torch.cuda.current_stream(self._model.device).synchronize()

    def _computed(
        self, rows: Sequence[Scheduled], batch: Batch, progress: LayerProgress | None
    ) -> list[SampledToken | None]:
        sampling = self._begin_sampling(batch.sampled_requests)
        if sampling is not None and sampling.cargo is not None:
            batch = replace(batch, cargo=sampling.cargo)
        logits = self._all_logits(rows, batch, progress)
        if logits is None or sampling is None:
            self._wait()  # sampling would have
            return [None] * len(rows)
        sampled = fan_in(sampling.tokens(logits), batch.sampled_requests)
        if len(sampled) == len(rows):
            return [*sampled]
        tokens = iter(sampled)
        return [next(tokens) if row.samples else None for row in rows]

    def _begin_sampling(self, requests: Sequence[Request]) -> StepSampling | None:
        """Prepare the sampling of a step that is not computed yet; None if nothing is sampled."""
        if not requests:
            return None
        answers, owners = fan_out(requests)
        masks = self._grammars.masks(answers)
        return self._model.sampler.begin(Draws(answers, owners, masks, self._eos_token_ids))

    def _all_logits(
        self, rows: Sequence[Scheduled], batch: Batch, progress: LayerProgress | None
    ) -> Tensor | None:
        """Return the same as `_logits`; also store requested prompt scores and states."""
        if len(batch.sampled_rows) == len(batch.token_ids):  # decode only, the usual step
            return self._logits(batch, progress)
        states = wanted_states(rows, batch, self._model.config.hidden_size)
        if states is not None:
            batch = replace(batch, states=states)
        if is_scored(rows):
            logits = self._score(rows, batch, progress)
        else:
            logits = self._logits(batch, progress)
        if states is not None:
            pool(rows, states)
        return logits

    def _score(
        self, rows: Sequence[Scheduled], batch: Batch, progress: LayerProgress | None
    ) -> Tensor | None:
        """Return the same as `_logits`; also score prompts, part by part, to bound memory."""
        sampled: list[Tensor] = []
        vocab_size, at_once = self._model.config.vocab_size, self._scored_logits_bytes
        for part in scored_parts(rows, batch, vocab_size, at_once):
            # Only in the last part does a finished layer mean that the KV of all rows is there.
            logits = self._logits(part.batch, progress if part.is_last else None)
            if logits is not None:
                sampled.append(part.score(logits))
        return torch.cat(sampled) if len(batch.sampled_rows) else None

    def _logits(self, batch: Batch, progress: LayerProgress | None) -> Tensor | None:
        """Return [num_sampled, vocab_size] float32, or None if no row of the batch is sampled."""
        started_s = time.perf_counter()
        marks = None if progress is None else _LayerMarks(progress, self._model.device)
        heard = None if marks is None else marks.heard
        logits = self._model.logits(batch, self._kv_cache.pool, heard)
        if marks is not None:
            marks.wait()
        self.model_s += time.perf_counter() - started_s
        return logits

    def warmup(self, num_tokens: int) -> None:
        """Compute one prompt of `num_tokens` tokens, so that the first request has no setup costs.

        Overwrites the first blocks of the pool, so it must be called while the pool is empty.
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


class _LayerMarks:
    """Reports the layers of one step once their KV is actually written, also on a GPU."""

    def __init__(self, progress: LayerProgress, device: torch.device) -> None:
        self.heard = LayerProgress(progress.ends, self._on_kv)  # passed to the model
        self._progress = progress
        self._device = device
        self._is_asynchronous = device.type != "cpu"
        self._launched: deque[tuple[int, torch.cuda.Event]] = deque()

    def _on_kv(self, num_layers: int) -> None:
        """Handle that the KV of `num_layers` layers was written, or on a GPU launched."""
        if not self._is_asynchronous:
            self._progress.done(num_layers)
            return
        event = torch.cuda.current_stream(self._device).record_event()
        self._launched.append((num_layers, event))
        while _is_complete(self._launched[0][1]) and self._report_first():
            pass

    def wait(self) -> None:
        """Wait for layers that were launched but not reported yet, and report them in order."""
        while self._launched:
            self._launched[0][1].synchronize()
            self._report_first()

    def _report_first(self) -> bool:
        """Report the first launched group of layers; return whether more were launched."""
        num_layers, _ = self._launched.popleft()
        self._progress.done(num_layers)
        return bool(self._launched)


def _is_complete(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
