"""EAGLE-3 heads, as the library `speculators` stores them: read, and computed in torch.

Rows of three layers of the model are fused to one, which goes through a layer of its own beside
the embedding of the next token. The head chooses among its own, smaller vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from pdserve.engine.attention.interface import AttentionBackend, LayerKv
from pdserve.engine.attention.reference import ReferenceAttention
from pdserve.engine.drafts.heads.head import BLOCK_TOKENS, HeadRows, laid_out
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.layers import rms_norm, torch_dtype
from pdserve.engine.models.config import ModelConfig, parse_model_config
from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.plan.forms import ActivationDtype
from pdserve.engine.rope import Rope, rotate
from pdserve.engine.steps.batch import Batch
from pdserve.kv import KvDtype, KvLayout
from pdserve.shared.errors import MisshapedTensor, MissingTensor, ModelError

CPU: Final = torch.device("cpu")
MOST_ROWS: Final = 256  # that are computed at a time
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

    def layout(self, dtype: ActivationDtype) -> KvLayout:
        """Of its KV."""
        return self.layer.kv_layout(BLOCK_TOKENS, KvDtype(dtype))

    def fixed_bytes(self, dtype: ActivationDtype) -> int:
        """Memory of its weights, and of what it computes of MOST_ROWS at a time."""
        layer = self.layer
        widest = (len(self.taps) + 8) * layer.hidden_size + 3 * layer.intermediate_size
        widest += 2 * (layer.num_heads + layer.num_kv_heads) * layer.head_dim
        numbers = sum(map(prod, self.shapes.values())) + MOST_ROWS * widest
        return numbers * dtype.itemsize + MOST_ROWS * self.draft_vocab_size * 4

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
    device: torch.device = CPU
    dtype: ActivationDtype = ActivationDtype.FLOAT32  # of all that it computes

    @property
    def block_bytes(self) -> int:
        """Memory of a block."""
        return self.config.layout(self.dtype).block_bytes

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
    """A head. Implements `Head`."""

    most_tokens: Final = 1024
    num_layers: Final = 1

    def __init__(
        self,
        plan: HeadPlan,
        weights: Mapping[str, Tensor],
        attention: AttentionBackend,
        upload: Callable[[Batch], Batch],
    ) -> None:
        """
        Args:
            plan: of the head.
            weights: by name, on the host.
            attention: on its device.
            upload: brings a batch there.

        Raises:
            MissingTensor, MisshapedTensor: `weights` are not those of the config.
        """
        config = plan.config
        for name, shape in config.shapes.items():
            if name not in weights:
                raise MissingTensor(f"the head lacks {name}")
            if tuple(weights[name].shape) != shape:
                raise MisshapedTensor(
                    f"{name} of the head is {tuple(weights[name].shape)}, its config says {shape}"
                )
        if "d2t" in weights:
            ids = torch.arange(config.draft_vocab_size) + weights["d2t"]
            if not bool(((ids >= 0) & (ids < config.layer.vocab_size)).all()):
                raise ModelError("d2t of the head names tokens that the model does not have")
        self.config = config
        self.name = plan.name
        self.taps = config.taps
        self.width = len(config.taps) * config.layer.hidden_size
        self.pool = BlockPool(plan.num_blocks, BLOCK_TOKENS, prefix_cache=False)
        self.block_bytes = plan.block_bytes
        self._kv = KvCache(config.layout(plan.dtype), plan.num_blocks, plan.device)
        self._device, self._dtype = plan.device, torch_dtype(plan.dtype)
        as_stored = {"d2t"} if plan.device.type != "cpu" else {"d2t", _EMBEDDING}  # mapped there
        self._weights = {
            name: weights[name].to(
                plan.device, weights[name].dtype if name in as_stored else self._dtype
            )
            for name in config.shapes
        }
        self._rope = Rope(config.layer.ropes[0], config.layer.head_dim, plan.device)
        self._attention = attention
        self._upload = upload

    @classmethod
    def load(cls, plan: HeadPlan) -> Eagle3Head:
        """Read it from its checkpoint's folder.

        Raises:
            ModelError: a file is damaged, or tensors are missing.
        """
        weights = read_weights(plan.folder)
        if plan.device.type == "cpu":
            return cls(plan, weights, ReferenceAttention(), lambda batch: batch)
        from pdserve.engine.cuda.heads import on_device  # only where a GPU is asked for

        head = cls(plan, weights, *on_device(plan.device))
        head.warm_up()
        return head

    def warm_up(self) -> None:
        """Launch what a step does of one row and of several, so that no stream compiles it."""
        states = self.entered(torch.zeros(2, self.width))
        for count in (1, 2):
            self.step([HeadRows([0] * count, states[:count], 0, 0, [0])])

    @torch.inference_mode()
    def entered(self, rows: Tensor) -> Tensor:
        """As Head.entered: fuse rows of several layers."""
        rows = rows.to(self._device, self._dtype)
        if self.config.norm_before_fc:
            rows = self._normed(rows, "input_norm.weight")
        return functional.linear(rows, self._weights["fc.weight"])

    @torch.inference_mode()
    def step(self, parts: Sequence[HeadRows], layer: int = 0) -> list[tuple[int, Tensor]]:
        """As Head.step, of as many streams together as have MOST_ROWS."""
        assert layer == 0, "there is no other"
        # A no-op on CPUs; Triton launches on the thread's current GPU, which need not be this one.
        with torch.cuda.device_of(self._kv.pool):  # type: ignore[no-untyped-call]
            return [found for group in _in_groups(parts) for found in self._step(group)]

    def _step(self, parts: Sequence[HeadRows]) -> list[tuple[int, Tensor]]:
        weights, eps = self._weights, self.config.layer.rms_norm_eps
        batch = laid_out(parts)
        shifts = [part.position - part.slot for part in parts for _ in part.tokens]
        batch = self._upload(replace(batch, positions=batch.positions + torch.tensor(shifts)))
        states = torch.cat([part.states for part in parts])
        embedded = functional.embedding(batch.token_ids, weights[_EMBEDDING]).to(self._dtype)
        normed = self._normed(states, _in("hidden_norm"))
        residual = normed if self.config.norm_before_residual else states
        both = torch.cat([self._normed(embedded, _in("input_layernorm")), normed], dim=-1)
        hidden = residual + self._attend(both, batch)
        inner = rms_norm(hidden, weights[_in("post_attention_layernorm")], eps)
        gate = functional.silu(functional.linear(inner, weights[_in("mlp.gate_proj")]))
        up = functional.linear(inner, weights[_in("mlp.up_proj")])
        hidden = hidden + functional.linear(gate * up, weights[_in("mlp.down_proj")])
        ends = self._normed(hidden, "norm.weight")
        own = functional.linear(ends[batch.sampled_rows], weights["lm_head.weight"]).argmax(-1)
        tokens = own + weights["d2t"][own] if "d2t" in weights else own
        behind = torch.split(
            ends if self.config.norm_output else hidden, [len(part.tokens) for part in parts]
        )
        return [*zip(tokens.tolist(), behind, strict=True)]

    def _attend(self, both: Tensor, batch: Batch) -> Tensor:
        """[n, 2 * hidden] -> [n, hidden]."""
        layer, weights, pool = self.config.layer, self._weights, self._kv.pool
        query, key, value = (
            functional.linear(both, weights[_in(f"self_attn.{n}_proj")]).view(
                len(both), -1, layer.head_dim
            )
            for n in "qkv"
        )
        if _in("self_attn.q_norm") in weights:
            query = self._normed(query, _in("self_attn.q_norm"))
            key = self._normed(key, _in("self_attn.k_norm"))
        angles = self._rope.cos_sin(batch.positions, both.dtype)
        query, key = rotate(query, *angles), rotate(key, *angles)
        ReferenceAttention().write_kv(pool, 0, key, value, batch.attention)
        kv = LayerKv(pool, 0, layer.attention_scale)
        attended = self._attention.attend(query, kv, batch.attention)
        return functional.linear(attended.flatten(1), weights[_in("self_attn.o_proj")])

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self._weights[name], self.config.layer.rms_norm_eps)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read a head's tensors. Raises ModelError: a file is damaged."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            weights |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
    return weights


def _in_groups(parts: Sequence[HeadRows]) -> Iterator[list[HeadRows]]:
    """Yield them in groups of at most MOST_ROWS, of which no stream has more."""
    group, num_rows = list[HeadRows](), 0
    for part in parts:
        if num_rows + len(part.tokens) > MOST_ROWS:
            yield group
            group, num_rows = [], 0
        group.append(part)
        num_rows += len(part.tokens)
    yield group


def _in(part: str) -> str:
    return f"layers.0.{part}.weight"
