"""The decoder in plain torch, on any device: the oracle, and the GPU fallback without Triton.

A step's rows are the tokens of all its requests, concatenated: chunks of prompts and decode tokens
alike. Only attention knows which rows belong to which request.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from pdserve.engine.adapters.adapter import Adapter
from pdserve.engine.adapters.torch_rows import AdaptedLayers, rows_of
from pdserve.engine.attention import LayerKv, WritingAttention
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.layers import GATED, Linear, head_norm, rms_norm
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.latent import LATENT_NORMS, LatentShape
from pdserve.engine.models.parameters import DecoderWeights, LayerWeights
from pdserve.engine.models.recurrent import STATE_VECTORS
from pdserve.engine.models.stage_ends import Finals, StageEnds
from pdserve.engine.models.torch_recurrent import RecurrentLayers
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.ranks.collectives import ALONE, Collectives
from pdserve.engine.rope import Angles, LayerRopes, rotate
from pdserve.engine.sampling.sampler import PlainSampler
from pdserve.engine.steps.batch import Batch
from pdserve.engine.steps.worst import LEAST_PART

NORMS: Final = (
    "attention_norm",
    "sinks",
    "after_attention_norm",
    "mlp_norm",
    "after_mlp_norm",
)


class TorchDecoder:
    """Decoder in plain torch, except for attention, which is a given backend."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        attention: WritingAttention,
        ranks: Collectives = ALONE,
        least_part: int = LEAST_PART,
    ) -> None:
        """`config` is that of the whole model, `weights` are those of this rank.

        Raises:
            ModelError: layers have norms, or the model arithmetic, of which this decoder has none.
        """
        latent = () if config.latent is None else LATENT_NORMS
        recurrent = config.recurrent
        weights.expect_norms(*NORMS, *latent, *(() if recurrent is None else STATE_VECTORS))
        self._recurrent = None
        if recurrent is not None:
            self._recurrent = RecurrentLayers(recurrent, config.rms_norm_eps)
        arithmetic = config.arithmetic
        self.config = config
        self.sampler = PlainSampler()
        self.most_ahead = 0
        self._own = ranks.shard.of(config)
        self._weights = weights
        self._ends = StageEnds(config, weights, weights.embedding.dtype, ranks, least_part)
        layers = ranks.shard.layers(config)
        self._first_layer = layers.start
        self._windows = config.sliding_windows[layers.start : layers.stop]
        self._attention = attention
        self._ranks = ranks
        ropes = config.ropes[layers.start : layers.stop]
        self._ropes = LayerRopes(ropes, config.rope_dim, weights.embedding.device)
        self._gated = GATED[arithmetic.activation]
        self._plan = ModelPlan.of(config, ranks.shard)

    @property
    def device(self) -> torch.device:
        """Device of the weights and the KV pool."""
        return self._weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights, activations and KV."""
        return self._weights.embedding.dtype

    def take_adapter(self, adapter: Adapter) -> None:
        """See Decoder.take_adapter."""
        first_token = self._ranks.shard.share(self.config.vocab_size).start
        adapter.check_base(self._weights.embedding, first_token)
        self._ends.adapters[adapter.digest] = adapter

    def drop_adapter(self, digest: str) -> None:
        """See Decoder.drop_adapter."""
        del self._ends.adapters[digest]

    def logits(
        self, batch: Batch, kv_pool: Tensor, progress: LayerProgress | None = None
    ) -> Tensor | None:
        """See Decoder.logits."""
        compute = partial(self._part, kv_pool)
        taps, rows = batch.taps, None
        if taps is not None:
            rows = torch.empty(taps.out.shape, device=self.device)
            batch = replace(batch, taps=replace(taps, out=rows))
        logits = self._ends.step(batch, compute, progress)
        if taps is not None and rows is not None:
            self._ends.gather_taps(tuple(taps.layers.tolist()), rows)
            if self._ends.leads:
                taps.out.copy_(rows)
        return None if logits is None else logits.float()

    def _part(self, kv_pool: Tensor, batch: Batch, progress: LayerProgress | None) -> Finals:
        batch = batch.to(self.device)
        hidden = self._forward(batch, kv_pool, progress)
        if not self._ends.is_last:
            self._ends.hand_on(hidden)
            return Finals()
        states = batch.states
        return Finals(
            self._normed(hidden, batch.sampled_rows) if len(batch.sampled_rows) else None,
            None if states is None else self._normed(hidden, states.rows.to(self.device)),
        )

    def _normed(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return self._norm(hidden[rows], self._weights.final_norm)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Normalise rows of the residual stream; no weight: there is no norm."""
        if weight is None:
            return x
        centres = self.config.arithmetic.centres_norms
        return rms_norm(x, weight, self.config.rms_norm_eps, centres=centres)

    def _after(self, layer: LayerWeights, norm: str, made: Tensor) -> Tensor:
        """Return what a sublayer adds to the residual, of what this rank has made of it."""
        return self._norm(self._ranks.all_reduce(made), layer.norms.get(norm))

    def _forward(self, batch: Batch, kv_pool: Tensor, progress: LayerProgress | None) -> Tensor:
        """Return the hidden states behind the layers: [num_tokens, hidden_size]."""
        rows = rows_of(batch, self._ends.adapters)
        adapted = AdaptedLayers(self._plan, rows)
        hidden = self._ends.enter(batch.token_ids, rows)
        scale, cap = self.config.attention_scale, self.config.arithmetic.attention_cap
        angles = self._ropes.angles(batch.positions, hidden.dtype)
        taps, latent, num_written = batch.taps, self.config.latent, 0
        attention = [batch.attention]
        if batch.spread is not None:
            attention = batch.spread.batches(batch.attention, kv_pool.shape[4])
        for index, plain in enumerate(self._weights.layers):
            layer = adapted.layer(index, plain)
            if taps is not None:
                tapped = taps.layers == self._first_layer + index
                taps.out[:, tapped] = hidden[batch.sampled_rows, None].to(taps.out)
            taken = self._norm(hidden, layer.norms.get("attention_norm"))
            if "recurrent_in" in layer.mixer:
                assert self._recurrent is not None, "as planned"
                attended = self._recurrent.mix(index, layer, taken, batch, kv_pool)
            else:
                which, place = 0, num_written
                if batch.spread is not None:
                    which, place = batch.spread.places[num_written].tolist()
                own_angles, gate = angles[self._ropes.of_layers[index]], None
                if latent is not None:
                    query, key, value = self._latent(layer, taken, own_angles, latent)
                else:
                    query, key, value, gate = self._heads(layer, taken, own_angles)
                self._attention.write_kv(kv_pool, place, key, value, attention[which])
                num_written += 1
                sinks = layer.norms.get("sinks")
                kv = LayerKv(kv_pool, place, scale, self._windows[index], cap, sinks)
                attended = self._attention.attend(query, kv, attention[which])
                if latent is not None:
                    attended = _of_heads(layer.heads["value"], attended[:, :, : latent.rank])
                attended = attended.flatten(1)
                attended = attended if gate is None else attended * gate.sigmoid()
            made = layer.mixer["attention_out"](attended)
            hidden += self._after(layer, "after_attention_norm", made)
            if progress is not None:
                progress.reached(num_written)  # the ranks have met: all have written their heads
            if not self.config.arithmetic.is_parallel:
                taken = self._norm(hidden, layer.norms.get("mlp_norm"))
            hidden += self._after(layer, "after_mlp_norm", layer.mlp(taken, self._gated))
        return hidden

    def _heads(
        self, layer: LayerWeights, normed: Tensor, angles: Angles
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries [num_tokens, num_heads, head_dim]; keys, values with num_kv_heads.

        And gates [num_tokens, num_heads * head_dim], if attention has them.
        """
        config, gate = self._own, None
        num_qk_heads = config.num_heads + config.num_kv_heads
        num_heads = num_qk_heads + config.num_kv_heads
        heads = layer.mixer["qkv"](normed).view(len(normed), -1, config.head_dim)
        query_key, value = heads[:, :num_qk_heads], heads[:, num_qk_heads:num_heads]
        if config.gates_attention:
            gate = heads[:, num_heads:].flatten(1)
        if layer.qk_norm is not None:
            query_key = head_norm(query_key, layer.qk_norm, config, self._ranks)
        query_key = rotate(query_key, *angles)
        query, key = query_key[:, : config.num_heads], query_key[:, config.num_heads :]
        return query, key, value, gate

    def _latent(
        self, layer: LayerWeights, normed: Tensor, angles: Angles, shape: LatentShape
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return queries [num_tokens, num_heads, row_dim], and rows of one head, without values."""
        source, mixer = normed, layer.mixer
        if shape.query_rank is not None:
            latent = mixer["query_latent"](normed)
            source = rms_norm(latent, layer.norms["query_latent_norm"], shape.norm_eps)
        queries = mixer["queries"](source).view(len(normed), -1, shape.query_dim)
        nope, rope = torch.split(queries, [shape.nope_dim, shape.rope_dim], dim=-1)
        absorbed = _of_heads(layer.heads["key"], nope)
        sizes = [shape.rank, shape.rope_dim]
        kept, turned = torch.split(mixer["latent"](normed), sizes, dim=-1)
        kept = rms_norm(kept, layer.norms["latent_norm"], shape.norm_eps)
        row = torch.cat([kept[:, None], rotate(turned[:, None], *angles)], dim=-1)
        return torch.cat([absorbed, rotate(rope, *angles)], dim=-1), row, None


def _of_heads(stack: Linear, x: Tensor) -> Tensor:
    """Multiply [num_tokens, num_heads, in_features] by each head's own matrix."""
    return torch.stack([stack[head](x[:, head]) for head in range(x.shape[1])], dim=1)
