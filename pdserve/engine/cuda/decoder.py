"""The decoder on a GPU: decode steps replay a CUDA graph, steps with prompts one for each layer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pdserve.engine.adapters.adapter import Adapter
from pdserve.engine.adapters.torch_rows import rows_of
from pdserve.engine.attention.interface import AttentionBackend
from pdserve.engine.cuda.attention.catalog import DecodeAttention
from pdserve.engine.cuda.attention.triton_attention import TritonAttention
from pdserve.engine.cuda.capture.graphs import BUCKETS, DecodeGraphs, DecodeInputs, Recorder
from pdserve.engine.cuda.capture.pieces import Buffers, Pieces
from pdserve.engine.cuda.copies.staging import Staging
from pdserve.engine.cuda.layers import experts
from pdserve.engine.cuda.layers.adapters import DeviceAdapters
from pdserve.engine.cuda.layers.forward import Forward, RowTaps, StepInputs
from pdserve.engine.cuda.layers.rows import GATED, take_sampled
from pdserve.engine.cuda.quantised.linear import warm_up_products
from pdserve.engine.cuda.sampling.sampler import CudaSampler
from pdserve.engine.experts import Experts
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.parameters import DecoderWeights
from pdserve.engine.models.stage_ends import Finals
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.ranks.collectives import ALONE, Collectives
from pdserve.engine.steps.batch import Batch, Taps
from pdserve.engine.steps.worst import LEAST_PART

_log = logging.getLogger(__name__)


class CudaDecoder:
    """Decoder for GPUs. Computes one step at a time, always from the same thread."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        attention: AttentionBackend,
        staging: Staging,
        recorder: Recorder | None,
        buckets: tuple[int, ...] = BUCKETS,
        decode_attention: DecodeAttention | None = None,
        ranks: Collectives = ALONE,
        piece_sizes: tuple[int, ...] = (),
        most_draws: int = BUCKETS[-1],
        least_part: int = LEAST_PART,
        tap_layers: tuple[int, ...] = (),
    ) -> None:
        """Assemble a decoder.

        Args:
            config: the architecture, of the whole model.
            weights: on a GPU, all of one dtype; this rank's.
            attention: for steps that no whole graph takes, such as those with chunks of prompts.
            staging: uploads batches from the host.
            recorder: captures CUDA graphs; None disables graphs.
            buckets: numbers of rows of the graphs of decode steps, ascending.
            decode_attention: of the graphs; None for our kernels.
            ranks: this rank and the others.
            piece_sizes: numbers of rows of the pieces of other steps, ascending; (): none.
            most_draws: there is memory to sample so many tokens at a time.
            least_part: rows that a part of a step has at least, if there are other stages.
            tap_layers: those of the taps that steps may have, the same in all stages.
        """
        self.config = config
        self._weights = weights
        self._attention = attention
        self._decode_attention = decode_attention or TritonAttention()
        self._staging = staging
        self._recorder = recorder
        self._buckets = buckets
        self._ranks = ranks
        self._forward = Forward(config, weights, ranks, least_part)
        self._least_part = least_part
        self._adapted: tuple[DeviceAdapters, Forward] | None = None  # of steps with adapters
        self.sampler = CudaSampler(staging, config.vocab_size, most_draws)
        self._piece_sizes = piece_sizes
        self._tap_layers = tap_layers
        self._graphs: DecodeGraphs | None = None
        self._pieces: Pieces | None = None
        self._graphs_pool = 0  # address of the KV pool that these were captured with

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights, activations and KV."""
        return self._weights.embedding.dtype

    @property
    def most_ahead(self) -> int:
        """Rows of the largest whole graph: attention that is launched may wait."""
        if self._recorder is None:
            return 0
        return self._buckets[-1] if self._graphs is None else self._graphs.largest

    def take_adapter(self, adapter: Adapter) -> None:
        """See Decoder.take_adapter."""
        first_token = self._ranks.shard.share(self.config.vocab_size).start
        adapter.check_base(self._weights.embedding, first_token)
        if self._adapted is None:
            self._adapted = self._adapted_forward()
        adapters, forward = self._adapted
        forward.ends.adapters[adapter.digest] = adapters.take(adapter)

    def drop_adapter(self, digest: str) -> None:
        """See Decoder.drop_adapter."""
        adapters, forward = self._with_adapters
        del forward.ends.adapters[digest]
        adapters.drop(digest)

    def _adapted_forward(self) -> tuple[DeviceAdapters, Forward]:
        """Return what computes steps with adapters, of the same weights."""
        plan = ModelPlan.of(self.config, self._ranks.shard)
        adapters = DeviceAdapters(plan, self._weights)
        return adapters, Forward(self.config, adapters.weights, self._ranks, self._least_part)

    @property
    def _with_adapters(self) -> tuple[DeviceAdapters, Forward]:
        assert self._adapted is not None, "adapters that are named were taken"
        return self._adapted

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Launch the kernels that not every first step does, so that no request compiles them."""
        with torch.cuda.device_of(self._weights.embedding):  # type: ignore[no-untyped-call]
            self.sampler.warm_up(self.device)
            one = torch.zeros(1, dtype=torch.int64, device=self.device)
            take_sampled(one, one.int())
            mixtures = [of.mlp for of in self._weights.layers if isinstance(of.mlp, Experts)]
            if mixtures:  # they are all alike
                gated = GATED[self.config.arithmetic.activation]
                experts.warm_up(mixtures[0], gated, self.dtype)
            warm_up_products(self._weights, self.dtype)

    @torch.inference_mode()
    def logits(
        self, batch: Batch, kv_pool: Tensor, progress: LayerProgress | None = None
    ) -> Tensor | None:
        """Compute one step, and write its keys and values into the pool. The batch is on the host.

        The first call captures the graphs, which takes seconds, so it should be a warm-up.
        """
        # Triton launches on the thread's current GPU, which need not be ours. With interpreted
        # kernels there is no GPU, and `torch.cuda.device` would raise.
        with torch.cuda.device_of(self._weights.embedding):  # type: ignore[no-untyped-call]
            return self._logits(batch, kv_pool, progress)

    def _logits(
        self, batch: Batch, kv_pool: Tensor, progress: LayerProgress | None
    ) -> Tensor | None:
        if self._recorder is not None and self._graphs_pool != kv_pool.data_ptr():
            self._capture(self._recorder, kv_pool)
        graphs, taps = None if batch.adapters else self._graphs, batch.taps
        assert taps is None or self._tap_layers, "as planned"
        if progress is None and graphs is not None and graphs.takes(batch):
            logits = graphs.logits(batch, self._staging)
            if taps is not None and graphs.taps is not None:
                self._bring(graphs.taps.out[: len(batch.sampled_rows)], taps)
            return logits
        part, forward = self._part, self._forward
        if batch.adapters:
            part, forward = self._adapted_part, self._with_adapters[1]
        compute, ends = partial(part, kv_pool), forward.ends
        if taps is None:
            found = ends.step(batch, compute, progress)
        else:
            rows = self._taps(len(batch.sampled_rows)).out
            found = ends.step(replace(batch, taps=replace(taps, out=rows)), compute, progress)
            ends.gather_taps(self._tap_layers, rows)
            self._bring(rows, taps)
        return None if found is None else found.float()

    def _taps(self, num_rows: int) -> RowTaps:
        shape = num_rows, len(self._tap_layers), self.config.hidden_size
        return RowTaps(self._tap_layers, torch.zeros(shape, device=self.device))

    def _bring(self, rows: Tensor, taps: Taps) -> None:
        """Begin to copy rows to the host, on the rank that has a head."""
        if self._forward.ends.leads:
            taps.wait = self._staging.bring(rows, taps.out).synchronize

    def _adapted_part(
        self, kv_pool: Tensor, batch: Batch, progress: LayerProgress | None
    ) -> Finals:
        """As `_part`, of a step some of whose rows have adapters. It takes no graphs."""
        adapters, forward = self._with_adapters
        rows = rows_of(batch, forward.ends.adapters)
        inputs = replace(self._uploaded(batch), adapted=rows)
        with adapters.computing(rows, self._staging):
            return forward.part(inputs, kv_pool, self._attention.attend, progress)

    def _part(self, kv_pool: Tensor, batch: Batch, progress: LayerProgress | None) -> Finals:
        """Launch a step, or a part of one."""
        pieces = self._pieces
        if pieces is not None and not pieces.takes(batch):
            pieces = None
        if pieces is not None:
            batch = self._on_device(pieces.filled(batch))
            return pieces.part(batch, kv_pool, self._attention, progress)
        inputs = self._uploaded(batch)
        return self._forward.part(inputs, kv_pool, self._attention.attend, progress)

    def _uploaded(self, batch: Batch) -> StepInputs:
        batch = self._on_device(batch)
        return StepInputs(
            batch.token_ids,
            batch.positions,
            batch.attention,
            batch.sampled_rows,
            batch.states,
            RowTaps.of(batch),
            batch.state_tables,
        )

    def _on_device(self, batch: Batch) -> Batch:
        batch = self._staging.upload(batch)
        if batch.sampled_before is not None:
            take_sampled(batch.token_ids, batch.sampled_before)
        return batch

    def _capture(self, recorder: Recorder, kv_pool: Tensor) -> None:
        """Capture the graphs over this pool, in place of those over another one."""
        self._graphs = self._pieces = None
        graphs = self._decode_graphs(recorder, kv_pool.shape[4])
        attend = self._decode_attention.attend_decode

        def step(rows: StepInputs) -> Tensor:
            found = self._forward.logits(rows, kv_pool, attend)
            assert found is not None, "every row of a graph is sampled"
            return found

        if not self._has_captured("decode steps", lambda: graphs.record(step)):
            self._recorder = None
            return
        self._graphs = graphs
        if self._piece_sizes:
            rows = self._piece_sizes[-1]
            buffers = Buffers.of(self._forward.own, rows, self.dtype, self.device)
            pieces = Pieces(self._forward, buffers, self._piece_sizes)
            if self._has_captured("steps with prompts", lambda: pieces.record(recorder, kv_pool)):
                self._pieces = pieces
        self._graphs_pool = kv_pool.data_ptr()

    def _decode_graphs(self, recorder: Recorder, block_size: int) -> DecodeGraphs:
        rows, ranks = self._buckets[-1], self._ranks
        inputs = DecodeInputs(rows, -(-self.config.max_model_len // block_size), self.device)
        shape = (rows, self._forward.num_columns)
        logits = torch.zeros(shape, dtype=torch.float32, device=self.device)
        taps = self._taps(rows) if self._tap_layers else None
        return DecodeGraphs(
            recorder, inputs, logits, block_size, self._buckets, ranks=ranks, taps=taps
        )

    def _has_captured(self, what: str, capture: Callable[[], None]) -> bool:
        """Capture; return whether it works."""
        try:
            capture()
        except RuntimeError:  # torch's errors of CUDA; one that sticks fails the next step, too
            if not self._ranks.shard.is_whole:
                _log.error("a rank cannot launch what others replay: try cuda_graphs = false")
                raise
            _log.warning("no CUDA graphs of %s: these launch their kernels", what, exc_info=True)
            return False
        return True
