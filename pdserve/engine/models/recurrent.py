"""Layers with a state instead of KV: the gated delta rule of hybrids. No torch here.

Each value head has a matrix [key_dim, value_dim] that every token decays and corrects, in float32:

    state = decay * state
    state = state + key ⊗ (beta * (value - state · key))
    out   = state · query

Queries, keys and values are convolved over the last few tokens before, each channel for itself.

Value heads share the query and the key of a group. What a request keeps of a layer is, group by
group, float32 throughout:

    conv    [kernel - 1, 2 * key_dim + group_values]   inputs, oldest first: query, key, values
    states  [values of the group, key_dim, value_dim]
    keys    [CHUNK, key_dim]
    deltas  [values of the group, CHUNK, value_dim]    beta * (value - state · key)
    shares  [values of the group, CHUNK + 1]

The native decoder leaves `states` as they are through a chunk of CHUNK tokens, and keeps what these
add: the state is `shares[CHUNK] * states` and the sum of `shares * keys ⊗ deltas`. Chunks begin at
multiples of CHUNK, wherever a prompt is divided: so bits depend on no division, and a decode step
only reads `states`. The other decoders take what is beside them in, token by token, and leave
zeros there, and a share of 1: so each goes on with what another has left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.engine.models.json_fields import JsonFields

CHUNK: Final = 16  # kChunk of csrc/recurrent/kernel.h
STATE_VECTORS: Final = ("convolution", "decay", "decay_bias", "value_norm")  # of such a layer
_FLOAT_BYTES: Final = 4
_LINEAR: Final = "linear_attention"
_KINDS: Final = {_LINEAR, "full_attention"}


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Sizes of the gated delta rule, and the layers that have it."""

    num_groups: int  # key heads
    num_values: int  # value heads, of all groups
    key_dim: int
    value_dim: int
    kernel: int  # tokens that the convolution sees, its own included
    layers: frozenset[int]

    @property
    def group_size(self) -> int:
        """Value heads of a group."""
        return self.num_values // self.num_groups

    @property
    def group_channels(self) -> int:
        """Numbers of a token in a group that are convolved."""
        return 2 * self.key_dim + self.group_size * self.value_dim

    @property
    def channels(self) -> int:
        """Those of all groups."""
        return self.num_groups * self.group_channels

    @property
    def values_width(self) -> int:
        """Numbers that a token's heads make."""
        return self.num_values * self.value_dim

    @property
    def input_width(self) -> int:
        """Of a token, group by group: what is convolved, and gates; then betas and decays."""
        return self.channels + self.values_width + 2 * self.num_values

    @property
    def group_state(self) -> int:
        """Numbers of a request's state in a group of a layer."""
        size, inputs = self.group_size, (self.kernel - 1) * self.group_channels
        of_chunk = CHUNK * (self.key_dim + size * self.value_dim) + size * (CHUNK + 1)
        return inputs + self.matrix_numbers + of_chunk

    @property
    def matrix_numbers(self) -> int:
        """Of these, numbers of the heads' matrices."""
        return self.group_size * self.key_dim * self.value_dim

    @property
    def layer_bytes(self) -> int:
        """Bytes of a request's state in a layer."""
        return self.num_groups * self.group_state * _FLOAT_BYTES

    @property
    def matrix_bytes(self) -> int:
        """Bytes of a request's matrices, which a token reads, and the last one of CHUNK writes."""
        return len(self.layers) * self.num_groups * self.matrix_numbers * _FLOAT_BYTES

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's state."""
        return len(self.layers) * self.layer_bytes


def no_recurrent(fields: JsonFields, num_layers: int) -> RecurrentShape | None:
    """All layers have attention."""
    return None


def qwen3_next_recurrent(fields: JsonFields, num_layers: int) -> RecurrentShape | None:
    """Of layer_types, or of all layers but every full_attention_interval-th.

    Raises:
        ModelError: a size is missing, or contradicts another; or no layer has attention.
    """
    types = fields.texts("layer_types")
    if types is None:
        period = fields.integer("full_attention_interval", 4)
        layers = frozenset(n for n in range(num_layers) if (n + 1) % period)
    elif len(types) != num_layers or set(types) - _KINDS:
        kinds = " and ".join(sorted(_KINDS))
        raise fields.error("layer_types", f"{num_layers} of {kinds}, one for each layer")
    else:
        layers = frozenset(n for n, kind in enumerate(types) if kind == _LINEAR)
    if len(layers) == num_layers:
        raise fields.error("layer_types", "with full_attention in a layer at least")
    if not layers:
        return None
    num_groups = fields.integer("linear_num_key_heads")
    num_values = fields.integer("linear_num_value_heads")
    if num_values % num_groups:
        raise fields.error("linear_num_value_heads", f"a multiple of {num_groups}, the key heads")
    return RecurrentShape(
        num_groups,
        num_values,
        fields.integer("linear_key_head_dim"),
        fields.integer("linear_value_head_dim"),
        fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        layers,
    )
