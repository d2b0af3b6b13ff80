"""The decoder on CPUs: a step is one call of the C++ decoder (csrc/decoder).

The call releases the interpreter lock, except while it reports layers. A row of logits depends, bit
for bit, only on that row and its request's KV: not on the rest of the batch, not on how its prompt
was split into chunks, and not on the number of threads.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pdserve import _native
from pdserve.engine.adapters.adapter import Adapter
from pdserve.engine.adapters.store import AdapterTaker
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.layers import embedding_factor
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.native.adapters import NativeAdapter, native_adapter
from pdserve.engine.native.weights import NativeWeights
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.ranks.shard import WHOLE, Shard
from pdserve.engine.ranks.step_memory import StepMemory
from pdserve.engine.rope import LayerRopes
from pdserve.engine.sampling.sampler import PlainSampler
from pdserve.engine.steps.batch import Batch
from pdserve.kv import KvDtype
from pdserve.protocol import Sickness
from pdserve.shared.errors import NodeSick

_LOOK_STEPS: Final = 256  # between two looks at how many rows of logits there have to be


class NativeDecoder:
    """Decoder on packed weights. Its threads are set by `_native.set_num_threads`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: NativeWeights,
        variant: str = "",
        shard: Shard = WHOLE,
        steps: StepMemory | None = None,
        first_pool_layer: int = 0,
    ) -> None:
        """Check that the weights are consistent, and keep them.

        Args:
            config: the architecture, of the whole model.
            weights: its weights, or a rank's share of them; their memory is read at every step,
                and may be mapped read-only.
            variant: a kernel build of `_native.kernel_variants()`; "" is the best this CPU can run.
            shard: the rank that this is.
            steps: where it meets the other ranks; None: there are none.
            first_pool_layer: the pool has the layers from this one on.

        Raises:
            ValueError: the weights are those of another architecture.
        """
        arithmetic = config.arithmetic
        self.config = config
        self._weights = weights
        self._variant = variant
        self.device = torch.device("cpu")
        self.dtype = weights.dtype
        self.sampler = PlainSampler()
        self.most_ahead = 0
        self._shard = shard
        self._first_pool_layer = first_pool_layer
        self._steps = steps
        own, layers, tokens = shard.of(config), shard.layers(config), shard.share(config.vocab_size)
        groups = shard.groups(config)
        ropes = LayerRopes(config.ropes[layers.start : layers.stop], config.rope_dim, self.device)
        self._decoder = _native.Decoder(
            weights,
            num_heads=own.num_heads,
            num_kv_heads=own.num_kv_heads,
            hidden_size=config.hidden_size,
            head_dim=config.head_dim,
            norm_eps=config.rms_norm_eps,
            is_bfloat16=weights.dtype == torch.bfloat16,
            sliding_windows=[config.sliding_windows[layer] or 0 for layer in layers],
            inverse_frequencies=ropes.inverse_frequencies,
            rope_scales=ropes.scales,
            layer_ropes=ropes.of_layers,
            activation=arithmetic.activation,
            attention_scale=config.attention_scale,
            attention_cap=arithmetic.attention_cap or 0.0,
            logit_cap=arithmetic.logit_cap or 0.0,
            embedding_scale=embedding_factor(arithmetic, weights.dtype),
            logit_scale=arithmetic.logit_scale,
            centres_norms=arithmetic.centres_norms,
            norms_heads_together=arithmetic.norms_heads_together,
            is_parallel=arithmetic.is_parallel,
            variant=variant,
            model_kv_heads=config.num_kv_heads,
            first_kv_head=shard.kv_heads(config).start,
            vocab_size=config.vocab_size,
            first_token_id=tokens.start,
            num_token_ids=tokens.stop - tokens.start,
            first_layer=layers.start - first_pool_layer,
            pool_layers=len(config.kv_layers) - first_pool_layer,
            group=None if steps is None else steps.group,
            latent=config.latent,
            recurrent=config.recurrent,
            first_group=groups.start,
            num_groups=groups.stop - groups.start,
            gates_attention=config.gates_attention,
        )
        self._adapters: dict[str, NativeAdapter] = {}  # by digest
        self.others: AdapterTaker | None = None  # ranks, as this one knows them that is the first
        self._decoders = [self._decoder]  # that have them, with those beside this one
        self._logits = torch.empty(0, config.vocab_size)  # rows as `_logits_of` says
        self._most_rows = self._num_steps = 0  # since the size of these was looked at

    def beside(self) -> NativeDecoder:
        """Return another one of the same weights, whose steps may run beside those of this one."""
        assert self._steps is None, "one rank does both at a time"
        other = NativeDecoder(self.config, self._weights, self._variant)
        for digest, packed in self._adapters.items():
            other._decoder.take_adapter(digest, packed)
        self._decoders.append(other._decoder)
        other._adapters, other._decoders = self._adapters, self._decoders
        return other

    def round_kv(self, codes: KvDtype) -> None:
        """Round all KV to what rows of these codes can hold, from the next step on."""
        self._decoder.round_kv(codes)

    def take_adapter(self, adapter: Adapter) -> None:
        """See Decoder.take_adapter."""
        if isinstance(self._weights.embedding, torch.Tensor):  # else it is coded, or elsewhere
            tokens = self._shard.share(self.config.vocab_size)
            adapter.check_base(self._weights.embedding, tokens.start)
        scale = embedding_factor(self.config.arithmetic, self.dtype)
        packed = native_adapter(adapter, ModelPlan.of(self.config, self._shard), self.dtype, scale)
        if self.others is not None:
            self.others.take_adapter(adapter)
        self._adapters[adapter.digest] = packed
        for decoder in self._decoders:
            decoder.take_adapter(adapter.digest, packed)

    def drop_adapter(self, digest: str) -> None:
        """See Decoder.drop_adapter. A step that has it keeps it."""
        del self._adapters[digest]
        if self.others is not None:
            self.others.drop_adapter(digest)
        for decoder in self._decoders:
            decoder.drop_adapter(digest)

    @property
    def workspace_bytes(self) -> int:
        """Size of the memory for activations: what the largest step so far has needed."""
        return self._decoder.workspace_bytes

    def logits(
        self, batch: Batch, kv_pool: Tensor, progress: LayerProgress | None = None
    ) -> Tensor | None:
        """See Decoder.logits.

        Raises:
            ValueError: a token id, a row, a block id or a length is out of range.
            NodeSick: another rank has ended; no step can be computed any more.
        """
        if self._steps is None:
            return self._compute(batch, kv_pool, progress)
        shared = batch
        if self._shard.rank == 0 and self._shard.is_first_stage:
            self._steps.write(batch)
            if not self._shard.is_last_stage:  # other stages write some of the results
                shared = self._steps.read(self.config.hidden_size, self.config.vocab_size)
        try:
            logits = self._compute(shared, kv_pool, progress)
        except _native.RanksLost as error:
            raise NodeSick(f"{Sickness.RANK_LOST}: {error}") from None  # nobody's mistake
        for own, there in ((batch.states, shared.states), (batch.taps, shared.taps)):
            if own is not None and there is not None and own is not there:
                own.out.copy_(there.out)
        return logits

    def _logits_of(self, num_sampled: int) -> Tensor:
        """Memory for these rows: for as many as the steps of late, so a profile's are let go."""
        if self._steps is not None:
            return self._steps.logits(num_sampled, self.config.vocab_size)
        self._num_steps += 1
        self._most_rows = max(self._most_rows, num_sampled)
        is_large = self._num_steps >= _LOOK_STEPS and self._most_rows <= len(self._logits) // 2
        if num_sampled > len(self._logits) or is_large:
            self._logits = self._logits.new_empty(0)  # first: a row may be a MiB
            self._logits = torch.empty(self._most_rows, self.config.vocab_size)
        if self._num_steps >= _LOOK_STEPS:
            self._most_rows = self._num_steps = 0
        return self._logits[:num_sampled]

    def _compute(
        self, batch: Batch, kv_pool: Tensor, progress: LayerProgress | None
    ) -> Tensor | None:
        logits = self._logits_of(len(batch.sampled_rows))
        ends, done = ([], None) if progress is None else (list(progress.ends), progress.done)
        states, taps, spread = batch.states, batch.taps, batch.spread
        state_tables = batch.state_tables
        self._decoder.logits(
            batch.token_ids,
            batch.positions,
            batch.attention.query_start,
            batch.attention.context_lens,
            batch.attention.block_tables,
            batch.sampled_rows,
            kv_pool,
            logits,
            ends,
            done,
            state_rows=None if states is None else states.rows,
            states_out=None if states is None else states.out,
            taps=None if taps is None else taps.layers - self._first_pool_layer,
            taps_out=None if taps is None else taps.out,
            adapters=list(batch.adapters),
            adapted_from=list(batch.adapted_from),
            companions=None if spread is None else spread.companions,
            places=None if spread is None else spread.places,
            state_tables=None if state_tables is None else state_tables.blocks,
            kept_after=None if state_tables is None else state_tables.kept_after,
        )
        return logits if len(batch.sampled_rows) else None
