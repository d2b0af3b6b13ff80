"""Computes one step of the model: from the step's plan to sampled tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import torch
from msgspec import structs
from torch import Tensor

from pdserve.engine.grammar import GrammarProgress
from pdserve.engine.interface import OthersSampled
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.layer_marks import LayerMarks
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.native.decoder import NativeDecoder
from pdserve.engine.prompt_results.results import (
    LOGITS_BYTES,
    fan_in,
    fan_out,
    is_scored,
    pool,
    scored_parts,
    wanted_states,
)
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.sampling.interface import Draws, StepSampling
from pdserve.engine.scheduler import StepRuns
from pdserve.engine.steps.batch import Batch, Spread, StateTables, Taps
from pdserve.engine.steps.batches import StepBatches
from pdserve.engine.steps.taps import TapPlan, each_tapped, tap
from pdserve.kv.companions import Companions
from pdserve.lifecycle import Lifecycle
from pdserve.protocol import Prompt, SamplingParams
from pdserve.shared.errors import NodeSick


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
            model: on the pool's device, with the same dtype unless the pool has codes.
            kv_cache: with the model's layout, or this rank's part of it.
            eos_token_ids: tokens that `min_tokens` suppresses; None for those of the model config.
            scored_logits_bytes: maximum size of logits at a time, in steps that score prompts.
            grammars: computes the masks of answers that have a grammar.
        """
        own = kv_cache.layout
        layout = model.config.kv_layout(own.block_size, own.dtype, own.rounded_to)
        assert layout.model_shape == own.model_shape, "the pool is of this model"
        if own.rounded_to is not None:
            assert isinstance(model, NativeDecoder), "on CPUs only"
            model.round_kv(own.rounded_to)
        if not layout.dtype.is_coded:
            assert kv_cache.pool.dtype == model.dtype, "model and pool have one dtype"
        self.model_s = 0.0  # total time spent in the model itself, over all steps
        self.batches = StepBatches(kv_cache.layout.block_size)
        self._model = model
        self.kv_cache = kv_cache
        self._places = torch.tensor(kv_cache.layout.places, dtype=torch.int32)
        self._scored_logits_bytes = scored_logits_bytes
        self.grammars = grammars or GrammarProgress()
        self._eos_token_ids = model.config.eos_token_ids if eos_token_ids is None else eos_token_ids
        self._is_asynchronous = model.most_ahead > 0 or model.device.type != "cpu"
        self._last_end_s = 0.0  # of the last step, if that is so
        self.taps: TapPlan | None = None  # rows that steps copy out

    @property
    def model(self) -> Decoder:
        """What computes its steps."""
        return self._model

    def beside(self, grammars: GrammarProgress) -> ModelRunner:
        """Return another one of the same model and pool, whose steps may run beside these.

        Of the native decoder only. Its `grammars` are its own, as is memory for its steps.
        """
        assert isinstance(self._model, NativeDecoder), "on CPUs only"
        return ModelRunner(
            self._model.beside(),
            self.kv_cache,
            self._eos_token_ids,
            self._scored_logits_bytes,
            grammars,
        )

    @property
    def launcher(self) -> ModelRunner | None:
        """Itself, if a device computes the steps and can be ahead of the host; else None."""
        return self if self.most_ahead else None

    @property
    def most_ahead(self) -> int:
        """Rows of the largest step of decodes that can run ahead of the host; 0: none can."""
        return self._model.most_ahead

    def prepare(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> ModelStep:
        """Build the batch; return what computes it (`execute`), in any thread, whole or in halves.

        It must be called, or launched, before the next step is prepared.
        """
        batch = self.batches.lay_out(rows)
        if self.kv_cache.companions is not None:
            batch = replace(batch, spread=self._spread(self.kv_cache.companions))
        if self.kv_cache.layout.state_blocks:
            batch = replace(batch, state_tables=self._state_tables(rows))
        return ModelStep(self, rows, batch, progress)

    def foresee(self, rows: Sequence[Scheduled]) -> None:
        """Begin to build the batch of the step after this one, which may be running meanwhile."""
        self.batches.foresee(rows)

    def execute(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> list[SampledToken | None]:
        """Compute the rows' tokens, write their KV, and sample for each row that reaches its end.

        Requests are only read, so a plan can be executed again: if a step raises for one request,
        the others are unchanged and can be planned again. The exceptions are prompt scores, pooled
        states and rows for heads, where wanted: these are written into the requests, and are not
        added a second time when the plan is repeated.

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

    def _spread(self, companions: Companions) -> Spread:
        return Spread(torch.from_numpy(companions), self._places)

    def _state_tables(self, rows: Sequence[Scheduled]) -> StateTables:
        """Who only warms up or measures has some at the end of the pool."""
        count, end = self.kv_cache.layout.state_blocks, self.kv_cache.num_blocks
        places = end // count
        tables, kept_after = [], []
        for number, (request, _) in enumerate(rows):
            last = end - number % places * count
            own = request.state_blocks or list(range(last - count, last))
            num_tokens, kept = request.kept_state or (request.num_computed_tokens, own)
            tables.append([own, request.state_source or own, kept])
            kept_after.append(num_tokens - request.num_computed_tokens)
        blocks = torch.tensor(tables, dtype=torch.int32)
        return StateTables(blocks, torch.tensor(kept_after, dtype=torch.int32))

    # ---- parts of a step -----------------------------------------------------------------------

    def begin_sampling(self, requests: Sequence[Request]) -> StepSampling | None:
        """Prepare the sampling of a step that is not computed yet; None if nothing is sampled."""
        if not requests:
            return None
        answers, owners = fan_out(requests)
        masks = self.grammars.masks(answers)
        return self._model.sampler.begin(Draws(answers, owners, masks, self._eos_token_ids))

    def begin_decoding(self, requests: Sequence[Request]) -> StepSampling:
        """The same for decodes without grammars, while `foreseen`."""
        return self._model.sampler.begin(Draws(requests, None, None, self._eos_token_ids))

    def tap(self, rows: Sequence[Scheduled], batch: Batch) -> tuple[Batch, Tensor | None]:
        """Have the step's sampled rows copied out, if a head wants them."""
        if self.taps is None or not len(batch.sampled_rows):
            return batch, None
        hidden_size, is_decode = (
            self._model.config.hidden_size,
            len(batch.sampled_rows) == len(batch.token_ids),
        )
        if not is_decode and (
            is_scored(rows) or wanted_states(rows, batch, hidden_size) is not None
        ):
            return batch, None  # computed in parts, or its states are for somebody else
        is_pinned = self._model.device.type == "cuda"
        return tap(self.taps, batch, hidden_size, is_pinned=is_pinned)

    def all_logits(
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
        marks = None if progress is None else LayerMarks(progress, self._model.device)
        heard = None if marks is None else marks.heard
        logits = self._model.logits(batch, self.kv_cache.pool, heard)
        if marks is not None:
            marks.wait()
        if not self._is_asynchronous:
            self.model_s += time.perf_counter() - started_s
        return logits

    def wait(self) -> None:
        """Wait until the device is done: nothing writes to the blocks of the step any more.

        Once a step is over, its KV is announced, and its blocks may be given to others.
        """
        if self._model.device.type == "cuda":
            torch.cuda.current_stream(self._model.device).synchronize()

    def ended(self, launched_s: float) -> None:
        """Note the end of a step that a device has computed, and when it was launched."""
        if self._is_asynchronous:
            now_s = time.perf_counter()
            self.model_s += now_s - max(launched_s, self._last_end_s)
            self._last_end_s = now_s

    def warmup(self, num_tokens: int) -> None:
        """Compute one prompt of `num_tokens` tokens, so that the first request has no setup costs.

        Overwrites the first blocks of the pool, so it must be called while the pool is empty.
        """
        num_blocks = self.kv_cache.layout.blocks_for(num_tokens)
        assert num_blocks <= self.kv_cache.num_blocks, "a warmup fits into the pool"
        request = Request(
            request_id="warmup",
            prompt=Prompt([0] * num_tokens),
            sampling=SamplingParams(temperature=0.0),
            lifecycle=Lifecycle(received_s=0.0),
            block_table=list(range(num_blocks)),
        )
        self.execute([Scheduled(request, num_tokens)])


class ModelStep:
    """One step of a ModelRunner, from its layout to its tokens (`interface.LaunchedStep`).

    On a CPU, `launch` computes the model, and `result` samples. On a GPU, `launch` launches both.
    """

    def __init__(
        self,
        runner: ModelRunner,
        rows: Sequence[Scheduled],
        batch: Batch,
        progress: LayerProgress | None = None,
        sampling: StepSampling | None = None,
    ) -> None:
        """`sampling` may be prepared already; its batch has decodes only then."""
        self._runner = runner
        self._rows = rows
        self._batch = batch
        self._progress = progress
        self._sampling = sampling
        self._launched_s = 0.0
        self._tapped: Tensor | None = None
        self._taps: Taps | None = None

    def __call__(self) -> list[SampledToken | None]:
        """Compute it."""
        self.launch()
        return self.result()

    @torch.inference_mode()
    def launch(self) -> None:
        """Have the device compute it behind the steps before, and wait for nothing."""
        self._launched_s = time.perf_counter()
        try:
            self._launch()
        except NodeSick:
            raise  # a GPU that waits for another rank would do so for ever
        except Exception:
            with suppress(RuntimeError):  # what is wrong with the GPU is known already
                self._runner.wait()
            raise

    def _launch(self) -> None:
        batch, sampling = self._batch, self._sampling
        if sampling is None:
            sampling = self._runner.begin_sampling(batch.sampled_requests)
        if sampling is not None and sampling.cargo is not None:
            batch = replace(batch, cargo=sampling.cargo)
        batch, self._tapped = self._runner.tap(self._rows, batch)
        self._taps = batch.taps
        logits = self._runner.all_logits(self._rows, batch, self._progress)
        if logits is not None and sampling is not None:
            sampling.launch(logits)
            self._sampling = sampling

    @torch.inference_mode()
    def result(self) -> list[SampledToken | None]:
        """Wait until the device is done with it."""
        rows = self._rows
        if self._sampling is None:
            self._runner.wait()  # sampling would have
            self._runner.ended(self._launched_s)
            return [None] * len(rows)
        try:
            sampled = self._of_rows(self._sampling.tokens())
        except OthersSampled as error:
            of_rows = self._of_rows(list(filter(None, error.sampled)))
            raise OthersSampled(error.message, error.request_ids, of_rows) from None
        self._runner.ended(self._launched_s)
        if self._taps is not None:
            self._taps.wait()
        if self._tapped is not None and self._runner.taps is not None:
            for request, tapped in each_tapped(self._runner.taps, rows, self._tapped):
                request.tapped = tapped
        return sampled

    def _of_rows(self, drawn: Sequence[SampledToken]) -> list[SampledToken | None]:
        """Return one entry per row, given those of all answers."""
        sampled = fan_in(drawn, self._batch.sampled_requests)
        if len(sampled) == len(self._rows):
            return [*sampled]
        tokens = iter(sampled)
        return [_of_row(row, tokens) if row.samples else None for row in self._rows]

    @property
    def can_be_followed(self) -> bool:
        """Whether the device has its tokens, or will have them, for a next step."""
        if self._sampling is None or self._sampling.sampled is None:
            return False
        has_drafts = len(self._batch.sampled_requests) != len(self._rows)
        return not has_drafts and len(self._rows) <= self._runner.most_ahead

    def prepare_next(self, rows: Sequence[Scheduled]) -> ModelStep:
        """Prepare the step after this one, which is launched, and has decodes only, as that one."""
        assert self._sampling is not None, "it was launched, and has decodes only"
        runner, sampled = self._runner, self._sampling.sampled
        if sampled is None or len(rows) > runner.most_ahead:
            raise StepRuns("the host reads its tokens, or waits in the step behind it")
        batch = replace(runner.batches.lay_out(rows), sampled_before=sampled)
        runner.batches.foresee(rows)
        return ModelStep(runner, rows, batch, None, runner.begin_decoding(batch.sampled_requests))


def _of_row(row: Scheduled, tokens: Iterator[SampledToken]) -> SampledToken:
    """Take a row's tokens: those after its drafts are attached to the first."""
    token = next(tokens)
    num_drafts = len(row.request.draft)
    return structs.replace(token, after=tuple(islice(tokens, num_drafts))) if num_drafts else token
