"""Which tensors of a checkpoint, or which parts of them, make up which packed matrix.

A tensor-parallel rank has a share of the outputs of some matrices, and of the inputs of others,
whose results are added up over the ranks: a bias is added by rank 0 alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.expert_config import ExpertConfig
from pdserve.engine.ranks.shard import WHOLE, Shard

ALL = slice(None)

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True)
class MatrixSource:
    """A matrix of the decoder: the rows of its parts, concatenated in order."""

    name: str  # of the packed matrix
    parts: tuple[str, ...]  # tensor names in the checkpoint, without ".weight" and ".bias"
    num_out: int
    num_in: int
    has_bias: bool = False
    is_gated: bool = False
    is_float32: bool = False  # however the other matrices are stored
    rows: tuple[slice, ...] = ()  # of each part; empty: all of them
    columns: slice = field(default_factory=lambda: ALL)  # of every part

    @property
    def weights(self) -> list[str]:
        """Names of the weight tensors in the checkpoint, [rows, num_in] each."""
        return [f"{part}.weight" for part in self.parts]

    @property
    def biases(self) -> list[str]:
        """Names of the bias tensors in the checkpoint, [rows] each."""
        return [f"{part}.bias" for part in self.parts] if self.has_bias else []

    @property
    def rows_of_parts(self) -> list[tuple[str, slice]]:
        """(part, its rows that belong to the matrix), in order."""
        return list(zip(self.parts, self.rows or (ALL,) * len(self.parts), strict=True))


@dataclass(frozen=True, slots=True)
class MlpSource:
    """The sources of a layer's MLP, or of one of its experts."""

    gate_up: MatrixSource
    down: MatrixSource

    @property
    def matrices(self) -> tuple[MatrixSource, ...]:
        """All matrices, in the order of use."""
        return (self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class ExpertsSource:
    """The sources of a mixture of experts."""

    config: ExpertConfig
    router: MatrixSource
    mlps: tuple[MlpSource, ...]  # of each expert

    @property
    def matrices(self) -> tuple[MatrixSource, ...]:
        """All matrices, in the order of use."""
        return (self.router, *(matrix for mlp in self.mlps for matrix in mlp.matrices))


@dataclass(frozen=True, slots=True)
class LayerSource:
    """The sources of one layer: matrices, and names of the norm tensors in the checkpoint."""

    attention_norm: str
    qkv: MatrixSource
    q_norm: str | None
    k_norm: str | None
    attention_out: MatrixSource
    mlp_norm: str
    mlp: MlpSource | ExpertsSource

    @property
    def matrices(self) -> tuple[MatrixSource, ...]:
        """All matrices, in the order of use."""
        return (self.qkv, self.attention_out, *self.mlp.matrices)

    @property
    def norms(self) -> list[str]:
        """Names of all norm tensors, in the order of use."""
        names = (self.attention_norm, self.q_norm, self.k_norm, self.mlp_norm)
        return [name for name in names if name is not None]


def layer_source(config: ModelConfig, index: int, shard: Shard = WHOLE) -> LayerSource:
    """Return the sources of layer `index` of the model, for one rank."""
    own = shard.of(config)
    hidden, head_dim = config.hidden_size, config.head_dim
    num_qkv_heads = own.num_heads + 2 * own.num_kv_heads
    queries = _times(shard.share(config.num_heads), head_dim)
    keys = _times(shard.kv_heads(config), head_dim)
    adds_bias = shard.rank == 0
    layer = f"model.layers.{index}."
    attention = f"{layer}self_attn."
    qkv = (f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj")
    experts = config.experts_of(index)
    mlp = _mlp(config, layer, shard) if experts is None else _experts(experts, hidden, layer, shard)
    return LayerSource(
        attention_norm=f"{layer}input_layernorm.weight",
        qkv=MatrixSource(
            f"{layer}qkv",
            qkv,
            num_qkv_heads * head_dim,
            hidden,
            config.has_qkv_bias,
            rows=(queries, keys, keys),
        ),
        q_norm=f"{attention}q_norm.weight" if config.has_qk_norm else None,
        k_norm=f"{attention}k_norm.weight" if config.has_qk_norm else None,
        attention_out=MatrixSource(
            f"{layer}attention_out",
            (f"{attention}o_proj",),
            hidden,
            own.num_heads * head_dim,
            config.has_o_bias and adds_bias,
            columns=queries,
        ),
        mlp_norm=f"{layer}post_attention_layernorm.weight",
        mlp=mlp,
    )


def _mlp(config: ModelConfig, layer: str, shard: Shard) -> MlpSource:
    inner = shard.share(config.intermediate_size)
    gate, up, down = (f"{layer}mlp.{name}_proj" for name in ("gate", "up", "down"))
    source = _gated(layer, (gate, up, down), config.hidden_size, inner)
    return MlpSource(
        replace(source.gate_up, has_bias=config.has_mlp_bias),
        replace(source.down, has_bias=config.has_mlp_bias and shard.rank == 0),
    )


def _experts(experts: ExpertConfig, hidden: int, layer: str, shard: Shard) -> ExpertsSource:
    """Each rank has a share of the width of every expert, and scores them all."""
    names, inner = experts.names, shard.share(experts.intermediate_size)
    router = MatrixSource(
        f"{layer}router",
        (f"{layer}{names.router()}",),
        experts.num_experts,
        hidden,
        is_float32=True,
    )
    mlps = []
    for number in range(experts.num_experts):
        gate, up, down = (f"{layer}{name}" for name in names.expert(number))
        mlps.append(_gated(f"{layer}expert.{number}.", (gate, up, down), hidden, inner))
    return ExpertsSource(experts, router, tuple(mlps))


def _gated(prefix: str, parts: tuple[str, str, str], hidden: int, inner: slice) -> MlpSource:
    """Return a gated MLP, without biases, of those inner rows of gate, up and down."""
    gate, up, down = parts
    num_inner = inner.stop - inner.start
    return MlpSource(
        MatrixSource(
            f"{prefix}gate_up",
            (gate, up),
            2 * num_inner,
            hidden,
            is_gated=True,
            rows=(inner, inner),
        ),
        MatrixSource(f"{prefix}down", (down,), hidden, num_inner, columns=inner),
    )


def head_source(config: ModelConfig, shard: Shard = WHOLE) -> MatrixSource:
    """Return the source of the output matrix, which is the embedding if they are tied."""
    tokens = shard.share(config.vocab_size)
    part = EMBEDDING.removesuffix(".weight") if config.ties_embeddings else "lm_head"
    num_tokens = tokens.stop - tokens.start
    return MatrixSource("lm_head", (part,), num_tokens, config.hidden_size, rows=(tokens,))


def _times(heads: slice, head_dim: int) -> slice:
    return slice(heads.start * head_dim, heads.stop * head_dim)
