"""The decoder in float64, written for reading: what the native one is measured against.

With a rounding it is a prediction too: float64 but for the places where the native decoder rounds
to the model's dtype. Its distance from the exact result is the error that rounding explains.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.engine.layers import GATED, capped
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.rope_config import RopeConfig
from pdserve.engine.native.linear import PackedLinear, lanes_of_rows
from pdserve.engine.native.weights import NativeExperts, NativeLayer, NativeWeights
from pdserve.engine.rope import inverse_frequencies
from tests.unpack import unpack

Rounding = Callable[[Tensor], Tensor]


def to_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().double()


class ExactDecoder:
    """Logits of one sequence from position 0 on, in one go."""

    def __init__(
        self, config: ModelConfig, weights: NativeWeights, rounded: Rounding | None = None
    ) -> None:
        self._config = config
        self._weights = weights
        self._rounds = rounded is not None
        self._rounded: Rounding = rounded or (lambda x: x)

    def logits(self, token_ids: list[int]) -> Tensor:
        """[num_tokens, vocab_size] float64."""
        config, weights = self._config, self._weights
        scale = torch.tensor(config.arithmetic.embedding_scale).to(weights.embedding)
        hidden = weights.embedding[torch.tensor(token_ids)].double() * scale.double()
        for index, layer in enumerate(weights.layers):
            normed = self._norm(hidden, layer.norms["attention_norm"])
            attended = self._attend(layer, normed, index)
            made = self._product(attended, layer.matrices["attention_out"])
            hidden = hidden + self._after(layer, "after_attention_norm", made)
            normed = self._norm(hidden, layer.norms["mlp_norm"])
            if layer.experts is not None:
                made = self._mixed(normed, layer.matrices["router"], layer.experts)
            else:
                made = self._mlp(normed, layer.matrices)
            hidden = hidden + self._after(layer, "after_mlp_norm", made)
        logits = self._product(self._norm(hidden, weights.final_norm), weights.lm_head)
        return capped(logits, config.arithmetic.logit_cap)

    def _product(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if self._rounds and packed.form.is_quantised:
            x = to_integers(x)
        y = x @ unpack(packed).double().T
        if packed.bias is None:
            return y
        return y + packed.bias[lanes_of_rows(packed.num_out, is_gated=packed.is_gated)].double()

    def _after(self, layer: NativeLayer, norm: str, made: Tensor) -> Tensor:
        weight = layer.norms.get(norm)
        return made if weight is None else _rms_norm(made, weight, self._config.rms_norm_eps)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self._rounded(_rms_norm(hidden, weight, self._config.rms_norm_eps))

    def _mlp(self, normed: Tensor, mlp: dict[str, PackedLinear]) -> Tensor:
        gate, up = self._product(normed, mlp["gate_up"]).chunk(2, dim=-1)
        gated = GATED[self._config.arithmetic.activation](torch.cat((gate, up), dim=-1))
        return self._product(self._rounded(gated), mlp["down"])

    def _mixed(self, normed: Tensor, router: PackedLinear, experts: NativeExperts) -> Tensor:
        shares = self._product(normed, router).softmax(dim=-1)
        best = shares.topk(experts.num_chosen)
        weights = torch.zeros_like(shares).scatter(1, best.indices, best.values)
        if experts.normalizes_weights:
            weights /= weights.sum(dim=-1, keepdim=True)
        made = torch.stack([self._mlp(normed, mlp) for mlp in experts.matrices])
        return torch.einsum("eth,te->th", made, weights)

    def _attend(self, layer: NativeLayer, normed: Tensor, index: int) -> Tensor:
        """[num_tokens, num_heads * head_dim]."""
        config = self._config
        window, rope = config.sliding_windows[index], config.ropes[index]
        heads = self._rounded(self._product(normed, layer.matrices["qkv"])).view(
            len(normed), -1, config.head_dim
        )
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        query, key, value = heads.split(sizes, dim=1)
        norms = layer.norms
        query, key = (
            self._turned(heads, norms.get(name), rope)
            for heads, name in ((query, "q_norm"), (key, "k_norm"))
        )
        group_size = config.num_heads // config.num_kv_heads
        key, value = (x.repeat_interleave(group_size, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * config.attention_scale
        scores = capped(scores, config.arithmetic.attention_cap)
        distance = torch.arange(len(normed))[:, None] - torch.arange(len(normed))
        hidden = (distance < 0) | (distance >= (window or len(normed)))
        attention = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return self._rounded(torch.einsum("hqk,khd->qhd", attention, value).flatten(1))

    def _turned(self, heads: Tensor, norm: Tensor | None, rope: RopeConfig | None) -> Tensor:
        config = self._config
        if norm is not None:
            heads = _rms_norm(heads, norm, config.rms_norm_eps)
        # Angles are float32 where models are trained, so they are part of what is asked.
        frequencies = inverse_frequencies(rope, config.head_dim)
        angles = (torch.arange(len(heads)).float()[:, None, None] * frequencies).double()
        cos, sin = (
            f(angles) * (rope.attention_factor if rope else 1.0) for f in (torch.cos, torch.sin)
        )
        first, second = heads.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return self._rounded(turned)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.double()


def to_integers(x: Tensor) -> Tensor:
    """As x is multiplied by codes: multiples of a step, finer where one is far above others."""
    width = x.shape[-1]
    groups = torch.nn.functional.pad(x, (0, -width % 32)).unflatten(-1, (-1, 2, 16))
    largest = groups.abs().amax(-1, keepdim=True)
    of_blocks = largest.amax(-2, keepdim=True)
    is_wide = of_blocks > 1.5 * of_blocks.mean(-3, keepdim=True)
    finest = largest.amax((-3, -2), keepdim=True).clamp_min(1e-300) / 32639
    step = finest * torch.where(is_wide, 1.0, (largest / (127 * finest)).ceil().clamp_min(1))
    rounded = (groups / step).round() * step
    return rounded.flatten(-3)[..., :width]
