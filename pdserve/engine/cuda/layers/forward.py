"""The forward pass of a step on a GPU: products by cuBLAS, attention by a backend, the rest fused.

The residual stream is float32; the inputs of products and attention have the model's dtype.

Of the parts of a step only attention sees which rows are of one request. All others depend on the
number of rows alone, so `pieces.py` captures them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pdserve.engine.adapters.torch_rows import Rows
from pdserve.engine.attention.interface import Attend, AttentionBatch, LayerKv
from pdserve.engine.cuda.layers.experts import mix_experts
from pdserve.engine.cuda.layers.latent import latent_queries, latent_values
from pdserve.engine.cuda.layers.recurrent import RecurrentLayers
from pdserve.engine.cuda.layers.rows import GATED, Rotation, add_rms_norm, rotate_and_write
from pdserve.engine.experts import Experts
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.layers import head_norm, rms_norm
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.latent import LATENT_NORMS
from pdserve.engine.models.parameters import DecoderWeights
from pdserve.engine.models.recurrent import STATE_VECTORS
from pdserve.engine.models.stage_ends import Finals, StageEnds
from pdserve.engine.ranks.collectives import ALONE, Collectives
from pdserve.engine.rope import Angles, LayerRopes
from pdserve.engine.steps.batch import Batch, StateTables, WantedStates
from pdserve.engine.steps.worst import LEAST_PART

NORMS: Final = ("attention_norm", "sinks", "after_attention_norm", "mlp_norm", "after_mlp_norm")


@dataclass(frozen=True, slots=True)
class RowTaps:
    """Where sampled rows of the residual stream are copied before some layers, as `batch.Taps`."""

    layers: tuple[int, ...]
    out: Tensor  # [num_sampled, num_taps, hidden_size] float32

    @classmethod
    def of(cls, batch: Batch) -> RowTaps | None:
        """Return those of a batch whose taps are on the GPU."""
        taps = batch.taps
        return None if taps is None else cls(tuple(taps.layers.tolist()), taps.out)

    def take(self, layer: int, residual: Tensor, sampled_rows: Tensor | None) -> None:
        """Launch the copy of those before a layer, if they are wanted."""
        for place, tapped in enumerate(self.layers):
            if tapped == layer:
                self.out[:, place] = residual if sampled_rows is None else residual[sampled_rows]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of a step, or of a part of one, all on the GPU."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    attention: AttentionBatch
    sampled_rows: Tensor | None  # [num_sampled] int64; None for every row, in order
    states: WantedStates | None = None
    taps: RowTaps | None = None
    state_tables: StateTables | None = None
    adapted: Rows = ()  # which of its rows have which adapter; on the host


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """What rows carry from layer to layer."""

    residual: Tensor  # [num_rows, hidden_size] float32; each layer adds to it, in place
    angles: list[Angles]  # of each rope of the model, [num_rows, 1, head_dim / 2] float32


class Forward:
    """The layers of one model. Only launches kernels; waits for the GPU only to return states."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        ranks: Collectives = ALONE,
        least_part: int = LEAST_PART,
    ) -> None:
        """Raises ModelError: layers have norms of which this decoder has none."""
        recurrent = config.recurrent
        latent = () if config.latent is None else LATENT_NORMS
        weights.expect_norms(*NORMS, *latent, *(() if recurrent is None else STATE_VECTORS))
        self._recurrent = None
        if recurrent is not None:
            self._recurrent = RecurrentLayers(recurrent, config.rms_norm_eps, weights.layers)
        self._gated = GATED[config.arithmetic.activation]
        self.ranks = ranks
        self.own = ranks.shard.of(config)  # what this rank has of the model
        self._weights = weights
        self.ends = StageEnds(config, weights, torch.float32, ranks, least_part)
        layers = ranks.shard.layers(config)
        self.num_layers = len(layers)  # of this stage
        self.first_layer = layers.start
        self._windows = config.sliding_windows[layers.start : layers.stop]
        self._ropes = LayerRopes(config.ropes, config.rope_dim, weights.embedding.device)
        self._layer_ropes = self._ropes.of_layers[layers.start : layers.stop]
        with_kv = set(config.kv_layers)
        # Of each layer, how many before it have KV: where it is in the stage's part of the pool.
        self._places = [sum(each in with_kv for each in layers[:n]) for n in range(len(layers))]

    @property
    def num_columns(self) -> int:
        """Columns of what `logits` returns: vocab_size on rank 0 of the first stage."""
        return self.ends.num_columns

    def logits(
        self,
        inputs: StepInputs,
        kv_pool: Tensor,
        attend: Attend,
        progress: LayerProgress | None = None,
    ) -> Tensor | None:
        """Launch a step in one part.

        Returns:
            As StageEnds.results.
        """
        rows = inputs.token_ids if inputs.sampled_rows is None else inputs.sampled_rows
        part = self.part(inputs, kv_pool, attend, progress)
        logits = self.ends.results([part], len(rows), inputs.states, progress)
        if inputs.taps is not None:
            self.ends.gather_taps(inputs.taps.layers, inputs.taps.out)
        return logits

    def part(
        self, inputs: StepInputs, kv_pool: Tensor, attend: Attend, progress: LayerProgress | None
    ) -> Finals:
        """Launch a part of a step, of which `ends.results` makes results when all are launched."""
        stream = self.begin(inputs.token_ids, inputs.positions, inputs.adapted)
        delta: Tensor | None = None  # what the part before adds to the residual
        for layer in range(self.num_layers):
            if self._has_state(layer):
                attended = self._mixed(layer, stream, delta, inputs, kv_pool)
            else:
                attended = self._attended(layer, stream, delta, inputs, kv_pool, attend)
            if inputs.taps is not None:  # the delta has been added
                inputs.taps.take(self.first_layer + layer, stream.residual, inputs.sampled_rows)
            delta = self.attention_out(layer, attended)
            if progress is not None and not self._has_state(layer):
                progress.reached(self._places[layer] + 1)  # the ranks have met: all have written
            delta = self.mlp(layer, stream, delta)
        if not self.ends.is_last:
            assert delta is not None, "a stage has layers"
            self.ends.hand_on(stream.residual.add_(delta))
            return Finals()
        return self.finals(stream.residual, delta, inputs.sampled_rows, inputs.states)

    def begin(self, token_ids: Tensor, positions: Tensor, adapted: Rows = ()) -> ResidualStream:
        """Return what enters the first layer."""
        residual = self.ends.enter(token_ids, adapted)
        return ResidualStream(residual, self._ropes.angles(positions, torch.float32))

    def query(
        self,
        layer: int,
        stream: ResidualStream,
        delta: Tensor | None,
        slots: Tensor,
        kv_pool: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Add the delta to the residual, and write a layer's keys and values to these slots.

        Returns:
            [num_rows, num_heads, head_dim], the layer's queries, in `out` if that is given.
        """
        if self.own.latent is None:
            qkv = self._products("qkv", layer, stream, delta)
            return self._rotated(layer, stream, qkv, slots, kv_pool, out)
        weights, angles = self._weights.layers[layer], stream.angles[self._layer_ropes[layer]]
        normed = self._normed(stream.residual, delta, weights.norms.get("attention_norm"))
        there = slots, kv_pool, self._places[layer], out
        return latent_queries(weights, self.own.latent, normed, angles, *there)

    def _has_state(self, layer: int) -> bool:
        """Whether a layer has a state in place of KV."""
        return "recurrent_in" in self._weights.layers[layer].mixer

    def _mixed(
        self,
        layer: int,
        stream: ResidualStream,
        delta: Tensor | None,
        inputs: StepInputs,
        kv_pool: Tensor,
    ) -> Tensor:
        """Go on with a layer's states; return what its heads make: [num_rows, values_width]."""
        assert self._recurrent is not None, "as planned"
        assert inputs.state_tables is not None, "the pool is of a model with states"
        rows = self._products("recurrent_in", layer, stream, delta)
        weights = self._weights.layers[layer]
        return self._recurrent.mix(
            layer, weights, rows, inputs.attention, inputs.state_tables, kv_pool
        )

    def _attended(
        self,
        layer: int,
        stream: ResidualStream,
        delta: Tensor | None,
        inputs: StepInputs,
        kv_pool: Tensor,
        attend: Attend,
    ) -> Tensor:
        """Write a layer's keys and values; return what its heads make of those in their reach."""
        slots, kv = inputs.attention.slot_mapping, self.kv(layer, kv_pool)
        if not self.own.gates_attention:
            query = self.query(layer, stream, delta, slots, kv_pool)
            return attend(query, kv, inputs.attention)
        rows = self._products("qkv", layer, stream, delta)
        width = (self.own.num_heads + 2 * self.own.num_kv_heads) * self.own.head_dim
        qkv, gates = rows[:, :width].contiguous(), rows[:, width:]
        query = self._rotated(layer, stream, qkv, slots, kv_pool)
        return attend(query, kv, inputs.attention).flatten(1) * gates.sigmoid()

    def _products(
        self, name: str, layer: int, stream: ResidualStream, delta: Tensor | None
    ) -> Tensor:
        """Add the delta to the residual; return what this matrix of the layer's mixer makes."""
        weights = self._weights.layers[layer]
        normed = self._normed(stream.residual, delta, weights.norms.get("attention_norm"))
        return weights.mixer[name](normed)

    def _rotated(
        self,
        layer: int,
        stream: ResidualStream,
        qkv: Tensor,
        slots: Tensor,
        kv_pool: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """As `query`, of what the layer's product has made."""
        cos, sin = stream.angles[self._layer_ropes[layer]]
        qk_norm, eps = self._weights.layers[layer].qk_norm, self.own.rms_norm_eps
        if qk_norm is not None and self.own.arithmetic.norms_heads_together:
            heads = qkv.view(len(qkv), -1, self.own.head_dim)
            normed = head_norm(heads[:, : len(qk_norm)], qk_norm, self.own, self.ranks)
            qkv = torch.cat([normed, heads[:, len(qk_norm) :]], dim=1).flatten(1)
            qk_norm = None  # is done
        rotation = Rotation(cos, sin, qk_norm, eps)
        return rotate_and_write(qkv, rotation, slots, kv_pool, self._places[layer], out)

    def kv(self, layer: int, kv_pool: Tensor) -> LayerKv:
        """Return what a layer's queries attend to."""
        own, sinks = self.own, self._weights.layers[layer].norms.get("sinks")
        of_scores = own.attention_scale, self._windows[layer], own.arithmetic.attention_cap
        value_dim = None if own.latent is None else own.latent.rank
        return LayerKv(kv_pool, self._places[layer], *of_scores, sinks, value_dim)

    def attention_out(self, layer: int, attended: Tensor) -> Tensor:
        """Return what a layer's attention adds to the residual: [num_rows, hidden_size]."""
        weights = self._weights.layers[layer]
        if self.own.latent is not None:
            attended = latent_values(weights, attended)
        made = weights.mixer["attention_out"](attended.flatten(1))
        return self._after(layer, "after_attention_norm", made)

    def mlp(self, layer: int, stream: ResidualStream, delta: Tensor) -> Tensor:
        """Add the delta to the residual; return what the layer's MLP or experts will add to it."""
        weights = self._weights.layers[layer]
        is_parallel = self.own.arithmetic.is_parallel
        norm = weights.norms.get("attention_norm" if is_parallel else "mlp_norm")
        normed = self._normed(stream.residual, None if is_parallel else delta, norm)
        mlp, gated = weights.mlp, self._gated
        made = mix_experts(normed, mlp, gated) if isinstance(mlp, Experts) else mlp(normed, gated)
        made = self._after(layer, "after_mlp_norm", made)
        return made + delta if is_parallel else made

    def _after(self, layer: int, norm: str, made: Tensor) -> Tensor:
        """Return what a sublayer adds to the residual, of what this rank has made of it."""
        made = self.ranks.all_reduce(made)
        weight = self._weights.layers[layer].norms.get(norm)
        if weight is None:
            return made
        return add_rms_norm(made, None, weight, self.own.rms_norm_eps, torch.float32)

    def _normed(self, residual: Tensor, delta: Tensor | None, weight: Tensor | None) -> Tensor:
        """Add the delta to the residual; return the normalised sum in the model's dtype.

        Without a weight it is only rounded.
        """
        dtype = self._weights.embedding.dtype
        if weight is None or self.own.arithmetic.centres_norms:
            whole = residual if delta is None else residual.add_(delta)
            if weight is not None:
                whole = rms_norm(whole, weight, self.own.rms_norm_eps, centres=True)
            return whole.to(dtype)
        return add_rms_norm(residual, delta, weight, self.own.rms_norm_eps, dtype)

    def finals(
        self,
        residual: Tensor,
        delta: Tensor | None,
        sampled_rows: Tensor | None,
        states: WantedStates | None,
    ) -> Finals:
        """Return what results are made of. Of the last stage.

        Args:
            residual: behind the last layer: [num_rows, hidden_size].
            delta: what is still to be added; None: nothing.
            sampled_rows: as StepInputs.
            states: likewise.
        """
        wanted = sampled = None
        if states is not None:
            wanted = self._final(residual, delta, states.rows.to(residual.device))
        if sampled_rows is None or len(sampled_rows):
            sampled = self._final(residual, delta, sampled_rows)
        return Finals(sampled, wanted)

    def _final(self, residual: Tensor, delta: Tensor | None, rows: Tensor | None) -> Tensor:
        """Return the states after the last norm: [num rows, hidden_size] in the model's dtype."""
        if rows is not None:
            residual = residual[rows]
            delta = None if delta is None else delta[rows]
        return self._normed(residual, delta, self._weights.final_norm)
