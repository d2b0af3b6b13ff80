"""Fields of config.json that ask for arithmetic that a family does not have. No torch here."""

from __future__ import annotations

from typing import Any

from pdserve.engine.models.arithmetic import ACTIVATIONS
from pdserve.engine.models.families import Family
from pdserve.engine.models.json_fields import JsonFields
from pdserve.shared.errors import ModelError

# Each of these changes the arithmetic of some architecture or variant, and with these values of
# none. A family reads it, or refuses any other value: ignoring it would give wrong results.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rotary_pct": (1.0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "scale_emb": (1.0,),
    "scale_depth": (1.0,),
    "clip_qkv": (),
    "attention_chunk_size": (),
    "swiglu_alpha": (1.702,),
    "swiglu_limit": (7.0,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "attn_temperature_tuning": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "use_mrope": (False,),
    "alibi": (False,),
    "qkv_bias": (True,),
    "parallel_attn": (False,),
    "use_parallel_residual": (False,),
    "bias": (False,),
    "use_bidirectional_attention": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "n_routed_experts": (0,),
    "index_topk": (),
    "vision_config": (),
    "audio_config": (),
    "pruned_heads": ({},),
}


def refuse_foreign_fields(fields: JsonFields, family: Family) -> None:
    """Raise ModelError for a field that asks for arithmetic that the family does not have."""
    for key, neutral in _NEUTRAL.items():
        value = fields.raw(key)
        if key not in family.reads and value is not None and value not in neutral:
            raise ModelError(f"{fields.where}: {key} = {_shortened(value)} is not supported")
    if "auto_map" not in family.reads and "AutoModelForCausalLM" in fields.nested("auto_map"):
        raise ModelError(f"{fields.where}: auto_map asks for code of the model's own; none is run")
    for key in ("hidden_act", "hidden_activation"):
        name = fields.text(key, family.activation.value)
        if name != family.activation and family.activation not in ACTIVATIONS.get(name, ()):
            known = [name for name, found in ACTIVATIONS.items() if family.activation in found]
            raise fields.error(key, f"{' or '.join(known)} for this architecture")


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
