"""EAGLE-3 heads, as the library `speculators` stores them: read, and computed in torch.

Rows of three layers of the model are fused to one, which goes through a layer of its own beside
the embedding of the next token. The head chooses among its own, smaller vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from pdserve.engine.drafts.heads.head import BLOCK_TOKENS, HeadRows
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.layers import rms_norm
from pdserve.engine.models.config import ModelConfig, parse_model_config
from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.rope import Rope, rotate
from pdserve.shared.errors import MisshapedTensor, MissingTensor, ModelError

_EMBEDDING: Final = "embed_tokens.weight"
_LAYERS: Final = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class Eagle3Config(msgspec.Struct, frozen=True):
    """What config.json says of a head."""

    layer: ModelConfig  # of its one layer, and of the model's vocabulary
    draft_vocab_size: int
    taps: tuple[int, ...]  # layers of the model
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Of its KV, in float32: keys, then values, of BLOCK_TOKENS tokens."""
        return 2, BLOCK_TOKENS, self.layer.num_kv_heads, self.layer.head_dim

    @property
    def block_bytes(self) -> int:
        """Memory of a block."""
        return 4 * prod(self.block_shape)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of its tensors, by name."""
        layer, hidden = self.layer, self.layer.hidden_size
        heads, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        inner = layer.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            _EMBEDDING: (layer.vocab_size, hidden),
            "lm_head.weight": (self.draft_vocab_size, hidden),
            "fc.weight": (hidden, len(self.taps) * hidden),
            "norm.weight": (hidden,),
            _in("self_attn.q_proj"): (heads, 2 * hidden),
            _in("self_attn.k_proj"): (kv, 2 * hidden),
            _in("self_attn.v_proj"): (kv, 2 * hidden),
            _in("self_attn.o_proj"): (hidden, heads),
            _in("mlp.gate_proj"): (inner, hidden),
            _in("mlp.up_proj"): (inner, hidden),
            _in("mlp.down_proj"): (hidden, inner),
        }
        for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            shapes[_in(norm)] = (hidden,)
        if layer.architecture == _LAYERS["qwen3"]:
            shapes |= {_in(f"self_attn.{n}_norm"): (layer.head_dim,) for n in "qk"}
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (len(self.taps) * hidden,)
        if self.draft_vocab_size != layer.vocab_size:
            shapes["d2t"] = (self.draft_vocab_size,)
        return shapes


def parse_eagle3(values: Mapping[str, Any], where: str) -> Eagle3Config:
    """Read config.json of a checkpoint of `speculators`.

    Raises:
        ModelError: it is of another kind, or has what is not computed here; names it.
    """
    fields = JsonFields(dict(values), where)
    kind = fields.text("speculators_model_type", "")
    if kind != "eagle3":
        raise ModelError(f'{where}: speculators_model_type is "{kind}": only eagle3 can be used')
    inner = values.get("transformer_layer_config")
    if not isinstance(inner, dict) or inner.get("model_type") not in _LAYERS:
        known = ", ".join(_LAYERS)
        raise ModelError(f"{where}: transformer_layer_config.model_type must be one of {known}")
    named = {"architectures": [_LAYERS[inner["model_type"]]], "tie_word_embeddings": False}
    layer = parse_model_config(JsonFields(inner | named, f"{where}: transformer_layer_config"))
    taps = values.get("eagle_aux_hidden_state_layer_ids")
    for is_so, what in (
        (layer.num_layers != 1, "more than one layer"),
        (any(layer.sliding_windows), "sliding windows"),
        (layer.has_qkv_bias or layer.has_o_bias or layer.has_mlp_bias, "biases"),
        (fields.boolean("fc_norm", False), "fc_norm"),
        (not taps, "no eagle_aux_hidden_state_layer_ids"),
    ):
        if is_so:
            raise ModelError(f"{where}: an EAGLE-3 head with {what} cannot be used")
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=fields.integer("draft_vocab_size"),
        taps=tuple(int(tap) for tap in taps or ()),
        norm_before_residual=fields.boolean("norm_before_residual", False),
        norm_before_fc=fields.boolean("norm_before_fc", False),
        norm_output=fields.boolean("norm_output", False),
    )


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """A head as known before its weights are read."""

    folder: Path
    config: Eagle3Config
    num_blocks: int = 0  # of its KV
    name: str = ""  # as Head's

    @property
    def block_bytes(self) -> int:
        """Memory of a block."""
        return self.config.block_bytes

    def check_model(self, model: ModelConfig) -> None:
        """Raise ModelError: it is a head of another model."""
        own = self.config.layer
        for what, here, there in (
            ("hidden_size", own.hidden_size, model.hidden_size),
            ("vocab_size", own.vocab_size, model.vocab_size),
        ):
            if here != there:
                raise ModelError(f"it is a head of another model: {what} {here}, not {there}")
        if not all(0 <= tap < model.num_layers for tap in self.config.taps):
            raise ModelError(
                f"it is a head of another model: layers {', '.join(map(str, self.config.taps))} of "
                f"{model.num_layers}"
            )


class Eagle3Head:
    """A head in float32, on the CPU. Implements `Head`."""

    most_tokens: Final = 1024
    num_layers: Final = 1

    def __init__(
        self, config: Eagle3Config, weights: Mapping[str, Tensor], num_blocks: int, name: str = ""
    ) -> None:
        """
        Args:
            config: of the head.
            weights: by name.
            num_blocks: of its KV.
            name: see Head.

        Raises:
            MissingTensor, MisshapedTensor: `weights` are not those of the config.
        """
        for name, shape in config.shapes.items():
            if name not in weights:
                raise MissingTensor(f"the head lacks {name}")
            if tuple(weights[name].shape) != shape:
                raise MisshapedTensor(
                    f"{name} of the head is {tuple(weights[name].shape)}, its config says {shape}"
                )
        self.config = config
        self.name = name
        self.taps = config.taps
        self.width = len(config.taps) * config.layer.hidden_size
        self.pool = BlockPool(num_blocks, BLOCK_TOKENS, prefix_cache=False)
        self.block_bytes = config.block_bytes
        self._kv = torch.zeros(num_blocks, *config.block_shape)  # takes no memory until it is used
        as_stored = {"d2t", _EMBEDDING}  # of which few rows are read
        self._weights = {
            name: weights[name] if name in as_stored else weights[name].float()
            for name in config.shapes
        }
        if "d2t" in weights:
            ids = torch.arange(config.draft_vocab_size) + weights["d2t"]
            if not bool(((ids >= 0) & (ids < config.layer.vocab_size)).all()):
                raise ModelError("d2t of the head names tokens that the model does not have")
        self._rope = Rope(config.layer.ropes[0], config.layer.head_dim, torch.device("cpu"))

    @classmethod
    def load(cls, plan: HeadPlan) -> Eagle3Head:
        """Read it from its checkpoint's folder.

        Raises:
            ModelError: a file is damaged, or tensors are missing.
        """
        weights: dict[str, Tensor] = {}
        for file in sorted(plan.folder.glob("*.safetensors")):
            try:
                weights |= load_file(file)
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file} cannot be read: {error}") from error
        return cls(plan.config, weights, plan.num_blocks, plan.name)

    @torch.inference_mode()
    def entered(self, rows: Tensor) -> Tensor:
        """As Head.entered: fuse rows of several layers."""
        if self.config.norm_before_fc:
            rows = self._normed(rows, "input_norm.weight")
        return functional.linear(rows, self._weights["fc.weight"])

    @torch.inference_mode()
    def step(self, parts: Sequence[HeadRows], layer: int = 0) -> list[tuple[int, Tensor]]:
        """As Head.step; one stream after the other."""
        assert layer == 0, "there is no other"
        return [self._step(part) for part in parts]

    def _step(self, part: HeadRows) -> tuple[int, Tensor]:
        weights, eps = self._weights, self.config.layer.rms_norm_eps
        ids = torch.tensor(part.tokens)
        embedded = functional.embedding(ids, weights[_EMBEDDING]).float()
        normed = self._normed(part.states, _in("hidden_norm"))
        residual = normed if self.config.norm_before_residual else part.states
        both = torch.cat([self._normed(embedded, _in("input_layernorm")), normed], dim=-1)
        hidden = residual + self._attend(both, part)
        inner = rms_norm(hidden, weights[_in("post_attention_layernorm")], eps)
        gate = functional.silu(functional.linear(inner, weights[_in("mlp.gate_proj")]))
        up = functional.linear(inner, weights[_in("mlp.up_proj")])
        hidden = hidden + functional.linear(gate * up, weights[_in("mlp.down_proj")])
        states = self._normed(hidden, "norm.weight")
        own = int(functional.linear(states[-1:], weights["lm_head.weight"]).argmax())
        shift = int(weights["d2t"][own]) if "d2t" in weights else 0
        return own + shift, states if self.config.norm_output else hidden

    def _attend(self, both: Tensor, part: HeadRows) -> Tensor:
        """[n, 2 * hidden] -> [n, hidden]."""
        layer, weights, count = self.config.layer, self._weights, len(both)
        query, key, value = (
            functional.linear(both, weights[_in(f"self_attn.{n}_proj")]).view(
                count, -1, layer.head_dim
            )
            for n in "qkv"
        )
        if _in("self_attn.q_norm") in weights:
            query = self._normed(query, _in("self_attn.q_norm"))
            key = self._normed(key, _in("self_attn.k_norm"))
        positions = torch.arange(part.position, part.position + count)
        angles = self._rope.cos_sin(positions, both.dtype)
        query, key = rotate(query, *angles), rotate(key, *angles)
        keys, values = self._with_kv(key, value, part)
        groups = layer.num_heads // layer.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(groups, dim=1))
        ahead = torch.ones(count, len(keys), dtype=torch.bool).triu(len(keys) - count + 1)
        shares = (scores * layer.attention_scale).masked_fill(ahead, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", shares, values.repeat_interleave(groups, dim=1))
        return functional.linear(attended.flatten(1), weights[_in("self_attn.o_proj")])

    def _with_kv(self, key: Tensor, value: Tensor, part: HeadRows) -> tuple[Tensor, Tensor]:
        """Write KV of tokens; return theirs, and of all before: [num_tokens, num_kv_heads, dim]."""
        table, end = torch.tensor(part.block_table), part.slot + len(key)
        slots = torch.arange(part.slot, end)
        blocks, places = table[slots // BLOCK_TOKENS], slots % BLOCK_TOKENS
        self._kv[blocks, 0, places], self._kv[blocks, 1, places] = key, value
        kept = self._kv[table[: -(-end // BLOCK_TOKENS)]].transpose(0, 1).flatten(1, 2)[:, :end]
        return kept[0], kept[1]

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self._weights[name], self.config.layer.rms_norm_eps)


def _in(part: str) -> str:
    return f"layers.0.{part}.weight"
