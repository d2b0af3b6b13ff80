"""Packs weights that are in memory as torch tensors, for decoders without a checkpoint."""

from __future__ import annotations

from pdserve.engine.layers import Linear, Mlp
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.parameters import DecoderWeights, LayerWeights
from pdserve.engine.native.linear import PackedLinear, pack
from pdserve.engine.native.weights import NativeExperts, NativeLayer, NativeWeights
from pdserve.engine.plan.forms import FLOAT32, WeightForm


def pack_weights(weights: DecoderWeights, config: ModelConfig, form: WeightForm) -> NativeWeights:
    """Pack weights for the native decoder, which serves in the dtype of the embedding.

    Args:
        weights: on the CPU, float32 or bfloat16.
        config: of the same model.
        form: how to store the matrices.
    """
    return NativeWeights(
        dtype=weights.embedding.dtype,
        embedding=weights.embedding,
        layers=[_layer(layer, config, form) for layer in weights.layers],
        final_norm=weights.final_norm.float(),
        lm_head=pack(weights.lm_head.weight, form=form),
    )


def _layer(layer: LayerWeights, config: ModelConfig, form: WeightForm) -> NativeLayer:
    def packed(linear: Linear, *, is_gated: bool = False) -> PackedLinear:
        return pack(linear.weight, linear.bias, form=form, is_gated=is_gated)

    def mlp(mlp: Mlp) -> dict[str, PackedLinear]:
        return {"gate_up": packed(mlp.gate_up, is_gated=True), "down": packed(mlp.down)}

    norms = {name: norm.float() for name, norm in layer.norms.items()}
    if layer.qk_norm is not None:
        # There is a row per head; all query rows are equal, and so are all key rows.
        heads = {"q_norm": 0, "k_norm": config.num_heads}
        norms |= {name: layer.qk_norm[head].float() for name, head in heads.items()}
    matrices = {name: packed(linear) for name, linear in layer.mixer.items()}
    num_heads = config.num_heads if layer.heads else 0
    of_heads = [
        {name: packed(stack[head]) for name, stack in layer.heads.items()}
        for head in range(num_heads)
    ]
    if isinstance(layer.mlp, Mlp):
        return NativeLayer(norms, matrices | mlp(layer.mlp), None, of_heads)
    experts = layer.mlp
    matrices["router"] = pack(experts.router.weight, form=FLOAT32)
    if (shared := experts.shared) is not None:
        matrices |= {f"shared_{name}": packed for name, packed in mlp(shared.mlp).items()}
        if shared.weight is not None:
            matrices["shared_weight"] = pack(shared.weight.weight, form=FLOAT32)
    each = [
        mlp(Mlp(experts.gate_up[number], experts.down[number]))
        for number in range(experts.config.num_experts)
    ]
    config_of = experts.config
    numbers = config_of.num_chosen, config_of.normalizes_weights
    mixture = NativeExperts(each, *numbers, config_of.choice, experts.score_bias)
    return NativeLayer(norms, matrices, mixture, of_heads)
