"""A model's shape and arithmetic, read once from its checkpoint. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from pdserve.engine.models.arithmetic import PLAIN, Arithmetic
from pdserve.engine.models.expert_config import ExpertConfig
from pdserve.engine.models.families import (
    PLAIN_MLP,
    Family,
    LayerNorm,
    MlpTensors,
    find_family,
    resolve_bias,
    rotation,
)
from pdserve.engine.models.foreign_fields import refuse_foreign_fields
from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.latent import LatentShape
from pdserve.engine.models.layer_ropes import Ropes
from pdserve.engine.models.quantised.config import parse_quantisation, quantisation_of
from pdserve.engine.models.recurrent import RecurrentShape
from pdserve.engine.models.windows import Windows
from pdserve.engine.plan.forms import ActivationDtype
from pdserve.kv import KvDtype, KvLayout
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.model_files.end_tokens import end_tokens, token_ids

_MOST_LAYERS: Final = 1_000
_MOST_HEADS: Final = 10_000


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the decoder must know about a model besides its weights."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of layers without experts
    num_layers: int
    num_heads: int
    num_kv_heads: int  # with latent attention 1
    head_dim: int  # of rows in the pool, and of queries that are scored with them
    rms_norm_eps: float
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    norms: tuple[LayerNorm, ...]  # of each layer
    ties_embeddings: bool
    sliding_windows: Windows  # one per layer; None: the layer sees the whole context
    ropes: Ropes  # likewise
    max_model_len: int  # tokens, prompt and output together
    stored_dtype: str  # of the weights, as config.json says: "bfloat16", "float16", "float32"
    eos_token_ids: frozenset[int]
    experts: ExpertConfig | None = None
    has_sinks: bool = False  # a head has one more score, of no value
    has_fused_qkv: bool = False  # checkpoints have one tensor of the three
    mlp: MlpTensors = PLAIN_MLP
    arithmetic: Arithmetic = PLAIN
    norm_offset: float = 0.0  # what the weights of all norms lack in the checkpoint
    has_wide_norms: bool = False  # these weights are float32, whatever the type of activations
    latent: LatentShape | None = None  # None: heads have keys and values of their own
    recurrent: RecurrentShape | None = None  # None: all layers have attention
    gates_attention: bool = False  # what attention makes is multiplied by a sigmoid
    # Checkpoints have so many layers more, which predict further tokens: they are left out.
    num_further_layers: int = 0

    @property
    def kv_layers(self) -> list[int]:
        """Those that have KV: all, but for those with a state."""
        own = frozenset[int]() if self.recurrent is None else self.recurrent.layers
        return [layer for layer in range(self.num_layers) if layer not in own]

    @property
    def attention_scale(self) -> float:
        """Factor on the dot products of queries and keys."""
        scale = self.arithmetic.attention_scale
        return self.head_dim**-0.5 if scale is None else scale

    @property
    def rope_dim(self) -> int:
        """Size of the part of a head that the rotary embedding is of."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Size of what attention makes of a head: with latent attention, of the latent vector."""
        return self.head_dim if self.latent is None else self.latent.rank

    @property
    def pair_dim(self) -> int:
        """Numbers that a query and a key that it attends to are multiplied by: key and value."""
        return self.head_dim + self.value_dim

    @property
    def short_len(self) -> int:
        """Tokens of the longest request that is not a long one (`RopeConfig`); 0: all are alike."""
        return max((rope.short_len for rope in self.ropes if rope), default=0)

    def experts_of(self, layer: int) -> ExpertConfig | None:
        """The mixture of a layer; None: it has one MLP."""
        has_experts = self.experts is not None and layer in self.experts.layers
        return self.experts if has_experts else None

    @property
    def inner_widths(self) -> list[int]:
        """Inner widths of the MLPs: of layers without experts, of each expert, of a shared one."""
        if self.experts is None:
            return [self.intermediate_size]
        has_both = len(self.experts.layers) < self.num_layers
        shared = [self.experts.shared_size] * (self.experts.shared_size > 0)
        return [self.intermediate_size] * has_both + [self.experts.intermediate_size, *shared]

    def default_dtype(self, device_type: str) -> ActivationDtype:
        """The dtype to compute in by default: the stored one, but bfloat16 for float16 on CPUs."""
        if self.stored_dtype == ActivationDtype.FLOAT32:
            return ActivationDtype.FLOAT32
        is_float16 = self.stored_dtype == ActivationDtype.FLOAT16 and device_type != "cpu"
        return ActivationDtype.FLOAT16 if is_float16 else ActivationDtype.BFLOAT16

    def kv_layout(
        self, block_size: int, dtype: KvDtype, rounded_to: KvDtype | None = None
    ) -> KvLayout:
        """Return the layout of this model's KV blocks.

        Args:
            block_size: in tokens.
            dtype: of the cache.
            rounded_to: codes that its rows are rounded to, if any.
        """
        return KvLayout(
            num_layers=len(self.kv_layers),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
            is_latent=self.latent is not None,
            state_bytes=0 if self.recurrent is None else self.recurrent.state_bytes,
            rounded_to=rounded_to,
        )


def load_model_config(checkpoint: Checkpoint) -> ModelConfig:
    """Read config.json, or the same of a GGUF file, and which tokens end an answer.

    Raises:
        UnknownArchitecture: the architecture has no decoder; names it and the supported ones.
        UnsupportedRope: its variant of rotary embedding is not supported.
        ModelError: a field is missing, of the wrong type, contradicts another, or asks for
            arithmetic that the decoder does not have.
        TokenizerError: the tokenizer's files are malformed.
    """
    is_folder = checkpoint.path.is_dir()
    where = checkpoint.path / "config.json" if is_folder else checkpoint.path
    fields = JsonFields(checkpoint.config(), str(where))
    model = parse_model_config(fields)
    quantisation_of(checkpoint)  # may refuse what is stored
    ends = frozenset(i for i in end_tokens(checkpoint) if i < model.vocab_size)
    return replace(model, eos_token_ids=ends)


def parse_model_config(fields: JsonFields) -> ModelConfig:
    """Parse the fields of config.json alone. Raises the same errors as load_model_config."""
    architecture, family = find_family(fields)
    refuse_foreign_fields(fields, family)
    parse_quantisation(fields)
    num_layers = fields.integer("num_hidden_layers", maximum=_MOST_LAYERS)
    num_heads = fields.integer("num_attention_heads", maximum=_MOST_HEADS)
    latent = family.latent(fields)
    num_kv_heads = 1 if latent else fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of {num_heads}, the number of heads")
    max_positions = fields.integer("max_position_embeddings", family.default_max_positions)
    head_dim = _head_dim(fields, family, num_heads) if latent is None else latent.row_dim
    rope_dim = head_dim if latent is None else latent.rope_dim
    windows = family.windows(fields, num_layers)
    ropes = tuple(
        None if rope is None else rotation(family, rope, fields, rope_dim)
        for rope in family.ropes(fields, windows, max_positions, family.default_theta)
    )
    arithmetic = family.arithmetic(fields)
    if latent is not None and ropes[0] is not None:
        scale = latent.query_dim**-0.5 * ropes[0].score_factor
        arithmetic = replace(arithmetic, attention_scale=scale)
    eps = fields.number(family.norm_eps_key, family.default_norm_eps, above=0.0)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer(family.inner_key),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=eps / arithmetic.residual_scale**2,
        has_qkv_bias=resolve_bias(fields, "attention_bias", family.qkv_bias, family.biases_qkv),
        has_o_bias=family.o_bias is None and fields.boolean("attention_bias", family.biases_qkv),
        has_mlp_bias=resolve_bias(fields, "mlp_bias", family.mlp_bias),
        norms=family.norms,
        ties_embeddings=fields.boolean("tie_word_embeddings", family.ties_embeddings),
        sliding_windows=windows,
        ropes=ropes,
        max_model_len=min((rope.max_model_len for rope in ropes if rope), default=max_positions),
        stored_dtype=fields.text("dtype", fields.text("torch_dtype", "float32")),
        eos_token_ids=token_ids(fields.raw("eos_token_id")),
        experts=family.experts(fields, num_layers),
        has_sinks=family.has_sinks,
        has_fused_qkv=family.has_fused_qkv,
        mlp=family.mlp,
        arithmetic=arithmetic,
        norm_offset=family.norm_offset - fields.number("stored_norm_offset", 0.0),
        has_wide_norms=family.norm_offset != 0,
        latent=latent,
        recurrent=family.recurrent(fields, num_layers),
        gates_attention=family.gates_attention,
        num_further_layers=(
            fields.integer("num_nextn_predict_layers", 0, minimum=0)
            if "num_nextn_predict_layers" in family.reads
            else 0
        ),
    )


def _head_dim(fields: JsonFields, family: Family, num_heads: int) -> int:
    default = family.default_head_dim
    if default is None:
        hidden_size = fields.integer("hidden_size")
        if "head_dim" not in fields and hidden_size % num_heads:
            raise fields.error("hidden_size", f"a multiple of {num_heads}, the number of heads")
        default = hidden_size // num_heads
    head_dim = fields.integer("head_dim", default)
    if head_dim % 2:
        raise fields.error("head_dim", "even: the rotary embedding turns pairs")
    return head_dim
