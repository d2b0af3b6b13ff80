"""One step of the model: plan in, sampled tokens out. The only part of the engine that computes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pdserve.engine.batch import Batch
from pdserve.engine.fan_out import fan_in, fan_out
from pdserve.engine.grammar import GrammarProgress, no_vocabulary
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.pooling import pool, wanted_states
from pdserve.engine.prompt_scores import LOGITS_BYTES, is_scored, scored_parts
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.sampling import sample
from pdserve.engine.step_batches import StepBatches
from pdserve.lifecycle import Lifecycle
from pdserve.protocol import SamplingParams


class ModelRunner:
    """A model over a KV pool (`pdserve.engine.engine.Runner`)."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: KvCache,
        eos_token_ids: frozenset[int] | None = None,
        scored_logits_bytes: int = LOGITS_BYTES,
        grammars: GrammarProgress | None = None,
    ) -> None:
        """Put a model and its pool together.

        Args:
            model: on the pool's device, and of its dtype.
            kv_cache: of the model's layout.
            eos_token_ids: tokens that `min_tokens` holds back; None: those of the model's config.
            scored_logits_bytes: logits at once, at most, in steps that score prompts.
            grammars: over the model's vocabulary; None: requests that have one fail.
        """
        layout = model.config.kv_layout(kv_cache.layout.block_size, kv_cache.layout.dtype)
        assert layout == kv_cache.layout, "the pool was laid out for another model"
        assert kv_cache.pool.dtype == model.dtype, "model and pool have one dtype"
        self.model_s = 0.0  # spent in the model itself, over all steps
        self.batches = StepBatches(kv_cache.layout.block_size)
        self._model = model
        self._kv_cache = kv_cache
        self._scored_logits_bytes = scored_logits_bytes
        self._grammars = grammars or GrammarProgress(no_vocabulary)
        self._eos_token_ids = model.config.eos_token_ids if eos_token_ids is None else eos_token_ids

    def prepare(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> Callable[[], list[SampledToken | None]]:
        """Lay the rows out; what is returned computes them (`execute`), in whatever thread.

        It is to be called before the next plan is prepared.
        """
        return partial(self._compute, rows, self.batches.lay_out(rows), progress)

    def foresee(self, rows: Sequence[Scheduled]) -> None:
        """Begin to lay out the step after this one, which may be running meanwhile."""
        self.batches.foresee(rows)

    def execute(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> list[SampledToken | None]:
        """Compute the rows' tokens, write their KV, and sample where a row reaches its end.

        Requests are only read, so the same plan can be executed again: a step that raised for one
        request leaves the others as they were, to be planned anew. What is written into them is
        the scores of their prompts and their states, where these are asked for; a second time, it
        is left out.

        Args:
            rows: whose requests have blocks for the tokens; no request twice.
            progress: hears of layers whose KV is in the pool. On a GPU nothing waits for a layer
                before the whole step has been launched.

        Returns:
            One entry per row, None where `row.samples` is false.

        Raises:
            RequestsFailed: the model's output for some requests is no distribution, or their
                grammars cannot be followed; names which.
        """
        return self.prepare(rows, progress)() if rows else []

    @torch.inference_mode()
    def _compute(
        self, rows: Sequence[Scheduled], batch: Batch, progress: LayerProgress | None
    ) -> list[SampledToken | None]:
        logits = self._all_logits(rows, batch, progress)
        if logits is None:
            if self._model.device.type == "cuda":
                # The KV is announced, and its blocks may go to others, once the step is over.
                # Sampling waits for the GPU anyhow.
                torch.cuda.current_stream(self._model.device).synchronize()
            return [None] * len(rows)
        logits, answers = fan_out(logits, batch.sampled_requests)
        masks = self._grammars.masks(answers)
        sampled = fan_in(
            sample(logits, answers, self._eos_token_ids, masks), batch.sampled_requests
        )
        if len(sampled) == len(rows):
            return [*sampled]
        tokens = iter(sampled)
        return [next(tokens) if row.samples else None for row in rows]

    def _all_logits(
        self, rows: Sequence[Scheduled], batch: Batch, progress: LayerProgress | None
    ) -> Tensor | None:
        """As `_logits`, and whatever is asked for of the rows' prompts is noted in them."""
        if len(batch.sampled_rows) == len(batch.token_ids):  # the usual step has no prompts
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
        """As `_logits`, and the rows' prompts get their scores: part by part, to bound memory."""
        sampled: list[Tensor] = []
        vocab_size, at_once = self._model.config.vocab_size, self._scored_logits_bytes
        for part in scored_parts(rows, batch, vocab_size, at_once):
            # Of the layers of a part the KV of all rows is there only if it is the last part.
            logits = self._logits(part.batch, progress if part.is_last else None)
            if logits is not None:
                sampled.append(part.score(logits))
        return torch.cat(sampled) if len(batch.sampled_rows) else None

    def _logits(self, batch: Batch, progress: LayerProgress | None) -> Tensor | None:
        """[num_sampled, vocab_size] float32, or None when no row of the batch is sampled from."""
        started_s = time.perf_counter()
        marks = None if progress is None else _LayerMarks(progress, self._model.device)
        heard = None if marks is None else marks.heard
        logits = self._model.logits(batch, self._kv_cache.pool, heard)
        if marks is not None:
            marks.wait()
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


class _LayerMarks:
    """Reports the layers of one step when their KV is really there."""

    def __init__(self, progress: LayerProgress, device: torch.device) -> None:
        self.heard = LayerProgress(progress.ends, self._on_kv)  # what the model is to report
        self._progress = progress
        self._device = device
        self._is_asynchronous = device.type != "cpu"
        self._launched: deque[tuple[int, torch.cuda.Event]] = deque()

    def _on_kv(self, num_layers: int) -> None:
        """The KV of so many layers was written, or its writing launched."""
        if not self._is_asynchronous:
            self._progress.done(num_layers)
            return
        event = torch.cuda.current_stream(self._device).record_event()
        self._launched.append((num_layers, event))
        while _is_complete(self._launched[0][1]) and self._report_first():
            pass

    def wait(self) -> None:
        """Report what was only launched so far, layer by layer."""
        while self._launched:
            self._launched[0][1].synchronize()
            self._report_first()

    def _report_first(self) -> bool:
        """The first group is there; whether others have been launched behind it."""
        num_layers, _ = self._launched.popleft()
        self._progress.done(num_layers)
        return bool(self._launched)


def _is_complete(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
