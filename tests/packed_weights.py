"""Packs weights that are in memory as torch tensors, for decoders without a checkpoint."""

from __future__ import annotations

from torch import Tensor

from pdserve.engine.experts import Experts
from pdserve.engine.layers import Linear, Mlp
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.parameters import DecoderWeights, LayerWeights
from pdserve.engine.native.linear import PackedLinear, WeightKind, pack
from pdserve.engine.native.weights import NativeExperts, NativeLayer, NativeMlp, NativeWeights


def pack_weights(weights: DecoderWeights, config: ModelConfig, kind: WeightKind) -> NativeWeights:
    """Pack weights for the native decoder, which serves in the dtype of the embedding.

    Args:
        weights: on the CPU, float32 or bfloat16.
        config: of the same model.
        kind: how to store the matrices.
    """
    return NativeWeights(
        dtype=weights.embedding.dtype,
        embedding=weights.embedding,
        layers=[_layer(layer, config, kind) for layer in weights.layers],
        final_norm=weights.final_norm.float(),
        lm_head=pack(weights.lm_head, kind=kind),
    )


def _layer(layer: LayerWeights, config: ModelConfig, kind: WeightKind) -> NativeLayer:
    def packed(linear: Linear, *, is_gated: bool = False) -> PackedLinear:
        return pack(linear.weight, linear.bias, kind=kind, is_gated=is_gated)

    def mlp(mlp: Mlp) -> NativeMlp:
        return NativeMlp(packed(mlp.gate_up, is_gated=True), packed(mlp.down))

    def experts(experts: Experts) -> NativeExperts:
        pairs = zip(experts.gate_up, experts.down, strict=True)
        return NativeExperts(
            router=pack(experts.router, kind=WeightKind.FLOAT32),
            mlps=[mlp(Mlp(Linear(gate_up, None), Linear(down, None))) for gate_up, down in pairs],
            num_chosen=experts.config.num_chosen,
            normalizes_weights=experts.config.normalizes_weights,
        )

    def head_norm(head: int) -> Tensor | None:
        # There is a row per head; all query rows are equal, and so are all key rows.
        return None if layer.qk_norm is None else layer.qk_norm[head].float()

    return NativeLayer(
        attention_norm=layer.attention_norm.float(),
        qkv=packed(layer.qkv),
        q_norm=head_norm(0),
        k_norm=head_norm(config.num_heads),
        attention_out=packed(layer.attention_out),
        mlp_norm=layer.mlp_norm.float(),
        mlp=mlp(layer.mlp) if isinstance(layer.mlp, Mlp) else None,
        experts=experts(layer.mlp) if isinstance(layer.mlp, Experts) else None,
    )
