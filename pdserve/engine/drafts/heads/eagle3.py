"""EAGLE-3 heads, as the library `speculators` stores them: read, and computed in torch.

Rows of three layers of the model are fused to one, which goes through a layer of its own beside
the embedding of the next token. The head chooses among its own, smaller vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from pdserve.engine.layers import rms_norm
from pdserve.engine.models.config import ModelConfig, parse_model_config
from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.rope import Rope, rotate
from pdserve.shared.errors import MisshapedTensor, MissingTensor, ModelError

MOST_POSITIONS: Final = 1024  # of a stream, that its drafts attend to
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


@dataclass(slots=True)
class HeadKv:
    """Keys and values of one stream: [num_tokens, num_kv_heads, head_dim] each."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def keep_last(self, count: int) -> None:
        """Forget all before the last so many tokens."""
        del self.keys[:-count], self.values[:-count]

    def cut(self, length: int) -> None:
        """Forget what is behind the first so many tokens."""
        del self.keys[length:], self.values[length:]


class Eagle3Head:
    """A head in float32, on the CPU."""

    def __init__(self, config: Eagle3Config, weights: Mapping[str, Tensor]) -> None:
        """
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
    def load(cls, folder: Path, config: Eagle3Config) -> Eagle3Head:
        """Read it from a checkpoint's folder.

        Raises:
            ModelError: a file is damaged, or tensors are missing.
        """
        weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            try:
                weights |= load_file(file)
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file} cannot be read: {error}") from error
        return cls(config, weights)

    @torch.inference_mode()
    def fused(self, rows: Tensor) -> Tensor:
        """[n, num_taps, hidden] of the model -> [n, hidden]."""
        flat = rows.flatten(1)
        if self.config.norm_before_fc:
            flat = self._normed(flat, "input_norm.weight")
        return functional.linear(flat, self._weights["fc.weight"])

    @torch.inference_mode()
    def step(
        self, tokens: list[int], fused: Tensor, position: int, kv: HeadKv
    ) -> tuple[int, Tensor]:
        """Compute some consecutive tokens of one stream.

        Args:
            tokens: their ids in the model's vocabulary.
            fused: [len(tokens), hidden], of the token before each: `fused`, or what this returned.
            position: of the first.
            kv: of those before; theirs are added.

        Returns:
            The id of the likeliest next token, and [1, hidden] to go on from.
        """
        weights, eps = self._weights, self.config.layer.rms_norm_eps
        embedded = functional.embedding(torch.tensor(tokens), weights[_EMBEDDING]).float()
        normed = self._normed(fused, _in("hidden_norm"))
        residual = normed if self.config.norm_before_residual else fused
        both = torch.cat([self._normed(embedded, _in("input_layernorm")), normed], dim=-1)
        hidden = residual + self._attend(both, position, kv)
        inner = rms_norm(hidden, weights[_in("post_attention_layernorm")], eps)
        gate = functional.silu(functional.linear(inner, weights[_in("mlp.gate_proj")]))
        up = functional.linear(inner, weights[_in("mlp.up_proj")])
        hidden = (hidden + functional.linear(gate * up, weights[_in("mlp.down_proj")]))[-1:]
        state = self._normed(hidden, "norm.weight")
        own = int(functional.linear(state, weights["lm_head.weight"]).argmax())
        shift = int(weights["d2t"][own]) if "d2t" in weights else 0
        return own + shift, state if self.config.norm_output else hidden

    def _attend(self, both: Tensor, position: int, kv: HeadKv) -> Tensor:
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
        angles = self._rope.cos_sin(torch.arange(position, position + count), both.dtype)
        query, key = rotate(query, *angles), rotate(key, *angles)
        kv.keys += key.unbind()
        kv.values += value.unbind()
        first = max(0, len(kv.keys) - MOST_POSITIONS)
        keys, values = torch.stack(kv.keys[first:]), torch.stack(kv.values[first:])
        groups = layer.num_heads // layer.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(groups, dim=1))
        ahead = torch.ones(count, len(keys), dtype=torch.bool).triu(len(keys) - count + 1)
        shares = (scores * layer.attention_scale).masked_fill(ahead, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", shares, values.repeat_interleave(groups, dim=1))
        return functional.linear(attended.flatten(1), weights[_in("self_attn.o_proj")])

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self._weights[name], self.config.layer.rms_norm_eps)


def _in(part: str) -> str:
    return f"layers.0.{part}.weight"
