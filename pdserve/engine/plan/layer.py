"""A layer of a model: its norms, what mixes tokens, and its MLP or experts.

The query, key and value projections are one matrix, and so are gate and up: one large product
instead of several small ones. A tensor-parallel rank has its own heads and inner channels only. The
results of mixers and of MLPs are added up over the ranks, so only rank 0 adds their bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.expert_config import ExpertConfig
from pdserve.engine.plan.forms import FLOAT32, WeightForm, fitting_form
from pdserve.engine.plan.latent import LatentMixer
from pdserve.engine.plan.matrix import Matrices, Matrix, Part, TensorRows, mixer_out
from pdserve.engine.plan.norm import Norm
from pdserve.engine.plan.recurrent import RecurrentMixer
from pdserve.engine.ranks.shard import Shard
from pdserve.model_files.coding import Coding

_FLOAT32: Final = ("router", "shared_weight")  # matrices that are so in all models


@dataclass(frozen=True, slots=True)
class MlpPlan:
    """The MLP of a layer, or its experts."""

    matrices: Matrices  # gate_up and down; or the router, and those of a shared expert
    experts: tuple[Matrices, ...] = ()  # gate_up and down of each
    choice: ExpertConfig | None = None  # of experts
    score_bias: Norm | None = None  # [num_experts], see `Choice`


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer, as one rank has it. Everything is in the order of packed files."""

    norms: dict[str, Norm]  # by the names that decoders know; with `sinks`, if heads have them
    mixer: Matrices  # qkv, of heads of queries, keys and values, or others; and `mixer_out`
    mlp: MlpPlan
    window: int | None  # tokens that a query sees; None: all
    heads: tuple[Matrices, ...] = ()  # of latent attention, each its key and its value

    @property
    def has_kv(self) -> bool:
        """Whether it has attention; else it has a state."""
        return "recurrent_in" not in self.mixer

    @property
    def vectors(self) -> list[Norm]:
        """Norms, and whatever else is no matrix."""
        bias = self.mlp.score_bias
        return [*self.norms.values(), *([] if bias is None else [bias])]

    @property
    def matrices(self) -> Matrices:
        """All but those of heads and of experts."""
        return self.mixer | self.mlp.matrices

    @property
    def all_matrices(self) -> list[Matrix]:
        """With those of heads and of experts."""
        parts = (*self.heads, *self.mlp.experts)
        return [*self.matrices.values(), *(matrix for part in parts for matrix in part.values())]

    def coded(self, codings: Mapping[str, Coding]) -> LayerPlan:
        """Return the layer with matrices as `Matrix.coded`."""

        def each(matrices: Matrices) -> Matrices:
            return {
                name: matrix if name in _FLOAT32 else matrix.coded(codings)
                for name, matrix in matrices.items()
            }

        experts = tuple(each(expert) for expert in self.mlp.experts)
        mlp = replace(self.mlp, matrices=each(self.mlp.matrices), experts=experts)
        heads = tuple(each(head) for head in self.heads)
        return replace(self, mixer=each(self.mixer), mlp=mlp, heads=heads)


def layer_plan(config: ModelConfig, index: int, shard: Shard, form: WeightForm) -> LayerPlan:
    """Plan a layer of the model, for one rank."""
    layer, hidden = f"model.layers.{index}.", range(config.hidden_size)
    of_hidden = fitting_form(form, len(hidden))
    adds_bias = shard.rank == 0

    def gated(
        name: str, tensors: tuple[str, str, str], width: int, has_bias: bool, fused: str = ""
    ) -> Matrices:
        *names, down = (f"{layer}{tensor}" for tensor in tensors)
        inner = range(*shard.share(width).indices(width))
        rows, out = (
            _parts(names, [inner] * 2, [width] * 2, fused and layer + fused),
            (Part(down, hidden),),
        )
        bias = has_bias and adds_bias
        return {
            "gate_up": Matrix(f"{name}gate_up", rows, hidden, of_hidden, True, has_bias),
            "down": Matrix(
                f"{name}down", out, inner, fitting_form(form, len(inner)), has_bias=bias
            ),
        }

    def mlp() -> MlpPlan:
        experts = config.experts_of(index)
        if experts is None:
            own, width = config.mlp, config.intermediate_size
            tensors = (own.gate, own.up, own.down)
            return MlpPlan(gated(layer, tensors, width, config.has_mlp_bias, own.gate_up))
        scores = (Part(f"{layer}{experts.names.router()}", range(experts.num_experts)),)
        each = (
            (f"{layer}expert.{number}.", experts.names.expert(number))
            for number in range(experts.num_experts)
        )
        has_bias = experts.has_bias
        router = Matrix(f"{layer}router", scores, hidden, FLOAT32, has_bias=has_bias)
        matrices = {"router": router}
        if experts.shared_size:
            shared = gated(f"{layer}shared_", experts.names.shared(), experts.shared_size, False)
            matrices |= {f"shared_{name}": matrix for name, matrix in shared.items()}
        if experts.shared_size and experts.weighs_shared:
            weight = (Part(f"{layer}{experts.names.shared_gate()}", range(1)),)
            matrices["shared_weight"] = Matrix(f"{layer}shared_weight", weight, hidden, FLOAT32)
        bias = Norm(f"{layer}{experts.names.score_bias()}", experts.num_experts, is_wide=True)
        return MlpPlan(
            matrices,
            tuple(gated(*named, experts.intermediate_size, has_bias) for named in each),
            experts,
            bias if experts.choice.has_score_bias else None,
        )

    norms, window = _norms(config, index, shard), config.sliding_windows[index]
    if config.recurrent is not None and index in config.recurrent.layers:
        mixer = RecurrentMixer(config, config.recurrent, index, shard, form)
        return LayerPlan(norms | mixer.vectors(), mixer.matrices(), mlp(), None)
    if config.latent is None:
        return LayerPlan(norms, _mixer(config, index, shard, form), mlp(), window)
    latent = LatentMixer(config, config.latent, index, shard, form)
    norms |= latent.norms()
    return LayerPlan(norms, latent.matrices(), mlp(), window, latent.heads())


def _heads(of: slice, head_dim: int) -> range:
    """The rows of these heads."""
    return range(of.start * head_dim, of.stop * head_dim)


def _norms(config: ModelConfig, index: int, shard: Shard) -> dict[str, Norm]:
    """Those of the residual stream and of heads, and sinks."""
    layer, rope = f"model.layers.{index}.", config.ropes[index]
    has_heads = config.recurrent is None or index not in config.recurrent.layers
    own, head_dim = shard.of(config), config.head_dim
    together = config.arithmetic.norms_heads_together
    num_heads = {"q_norm": own.num_heads, "k_norm": own.num_kv_heads}
    numbers = {
        "q_norm": _heads(shard.share(config.num_heads), head_dim),
        "k_norm": _heads(shard.kv_heads(config), head_dim),
    }
    norms = {
        norm.name: Norm(
            f"{layer}{norm.tensor}.weight",
            (len(numbers[norm.name]) if together else head_dim)
            if norm.is_of_heads
            else config.hidden_size,
            num_heads[norm.name] if norm.is_of_heads else 0,
            norm.is_of_heads and together,
            config.norm_offset,
            config.has_wide_norms,
            (slice(numbers[norm.name].start, numbers[norm.name].stop),)
            if norm.is_of_heads and together
            else (),
            order=rope.head_order(head_dim) if rope and norm.is_of_heads and not together else (),
        )
        for norm in config.norms
        if has_heads or not norm.is_of_heads
    }
    if config.has_sinks:
        cut = (shard.share(config.num_heads),)
        norms["sinks"] = Norm(f"{layer}self_attn.sinks", own.num_heads, is_wide=True, cut=cut)
    return norms


def _mixer(config: ModelConfig, index: int, shard: Shard, form: WeightForm) -> Matrices:
    """Of heads that have keys and values of their own."""
    layer, hidden = f"model.layers.{index}.", range(config.hidden_size)
    head_dim, rope = config.head_dim, config.ropes[index]
    queries = _heads(shard.share(config.num_heads), head_dim)
    keys = _heads(shard.kv_heads(config), head_dim)
    qkv = _parts(
        [f"{layer}self_attn.{name}_proj" for name in "qkv"],
        [queries, keys, keys],
        [count * head_dim for count in (config.num_heads, *[config.num_kv_heads] * 2)],
        f"{layer}self_attn.qkv_proj" if config.has_fused_qkv else "",
        [() if rope is None else rope.head_order(head_dim)] * 2 + [()],
    )
    if config.gates_attention:
        qkv = _with_gates(qkv, queries, head_dim)
    of_hidden = fitting_form(form, len(hidden))
    adds_bias = config.has_o_bias and shard.rank == 0
    return {
        "qkv": Matrix(f"{layer}qkv", qkv, hidden, of_hidden, has_bias=config.has_qkv_bias),
        **mixer_out(layer, "self_attn.o_proj", hidden, queries, form, has_bias=adds_bias),
    }


def _with_gates(qkv: tuple[Part, ...], queries: range, head_dim: int) -> tuple[Part, ...]:
    """Files have a gate behind each head of the queries; here, they follow all heads."""
    name, order = qkv[0].name, tuple(range(head_dim))
    own = qkv[0].within.head_order if qkv[0].within is not None else order
    gates = tuple(head_dim + each for each in order)
    places = [TensorRows(name, 0, each, head_rows=2 * head_dim) for each in (own, gates)]
    query, gate = (
        Part(f"{name}.{part}", queries, place)
        for part, place in zip(("query", "gate"), places, strict=True)
    )
    return query, *qkv[1:], gate


def _parts(
    names: Sequence[str],
    rows: Sequence[range],
    widths: Sequence[int],
    fused: str,
    orders: Sequence[tuple[int, ...]] = ((), (), ()),
) -> tuple[Part, ...]:
    """Tensors of so many rows, of which a rank has some, one after the other in `fused`, if any."""
    parts = []
    firsts = accumulate(widths, initial=0)
    for name, own, first, order in zip(names, rows, firsts, orders, strict=False):
        within = TensorRows(fused or name, first if fused else 0, order)
        parts.append(Part(name, own, within if fused or order else None))
    return tuple(parts)
