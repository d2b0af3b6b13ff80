"""Tiny checkpoints with random weights, made through transformers: the reference and our input.

    make_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=3, tie_word_embeddings=True)

They come with a byte-level tokenizer and a chat template, so a whole cluster can serve them. Their
greedy output looks random and does not repeat itself, which makes comparing tokens mean something.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.cluster.prompts import EOS_TOKEN, EOS_TOKEN_ID

# family |-> its name in transformers, which imports it when it is asked for, and what a small model
# of it wants besides `_SMALL`
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    # Scales, caps and windows are such that each of them changes what the model says.
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 1000,
            "sliding_window": 40,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 12.0,
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 40,
            "num_hidden_layers": 7,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.3,
            "logits_scaling": 0.5,
        },
    ),
    "granite4": (
        "GraniteMoeHybrid",
        {
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "layer_types": ["full_attention"] * 2,
            "mamba_n_heads": 4,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.3,
            "logits_scaling": 0.5,
        },
    ),
    # Of experts so many gates and ups are beyond 7 that clamping matters.
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 32,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 24,
            "intermediate_size": 72,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [0, 1]}),
    "glm": ("Glm", {"head_dim": 32}),
    "glm4": ("Glm4", {"head_dim": 32}),
    "cohere2": (
        "Cohere2",
        {
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "logit_scale": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 104,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
}

_LATENT: dict[str, Any] = {  # no size is a multiple of those of vectors
    "num_key_value_heads": 4,
    "q_lora_rank": 44,
    "kv_lora_rank": 52,
    "qk_nope_head_dim": 28,
    "qk_rope_head_dim": 12,
    "v_head_dim": 20,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
}
_FAMILIES |= {
    "deepseek_v2": (
        "DeepseekV2",
        _LATENT | {"topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ("DeepseekV3", _LATENT),
}

_FAMILIES |= {
    "qwen3_next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 3,
            "full_attention_interval": 2,
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
            },
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 20,
            "linear_value_head_dim": 12,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
}

VOCAB_SIZE = 320

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}


def make_checkpoint(
    path: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a checkpoint with random weights.

    Args:
        path: directory, created if need be.
        family: a key of `_FAMILIES`.
        seed: of the weights.
        dtype: to store them in.
        max_shard_size: smaller than the model gives several files and an index.
        overrides: fields of the family's transformers config.

    Returns:
        `path`.
    """
    name, defaults = _FAMILIES[family]
    model_class = getattr(transformers, f"{name}ForCausalLM")
    config = model_class.config_class(**(_SMALL | defaults | overrides))
    torch.manual_seed(seed)
    model = model_class(config)
    _randomise(model)
    path.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    save_tokenizer(path)
    return path


def save_tokenizer(path: Path) -> None:
    """A tokenizer with one token per byte, and the end of a turn as a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS_TOKEN])
    assert tokenizer.token_to_id(EOS_TOKEN) == EOS_TOKEN_ID
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"eos_token": EOS_TOKEN, "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def edit_config(path: Path, name: str = "config.json", **changes: Any) -> None:
    """Change fields of a checkpoint's JSON file; None takes a field out."""
    file = path / name
    config = json.loads(file.read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    file.write_text(json.dumps(config))


def with_plain_tensors(path: Path, changed: Path, part: str, number: float) -> Path:
    """Copy a checkpoint; in tensors with this part in their names, all numbers are this one."""
    shutil.copytree(path, changed)
    file = changed / "model.safetensors"
    tensors = load_file(file)
    names = [name for name in tensors if part in name]
    assert names, f"no tensor is called {part}"
    save_file(tensors | {n: torch.full_like(tensors[n], number) for n in names}, file)
    return changed


def to_transformers_4_style(path: Path) -> None:
    """Rewrite config.json the way transformers 4 wrote it: rope_theta and rope_scaling."""
    rope = dict(json.loads((path / "config.json").read_text())["rope_parameters"])
    theta = rope.pop("rope_theta")
    scaling = rope if rope["rope_type"] != "default" else None
    edit_config(path, rope_parameters=None, rope_theta=theta, rope_scaling=scaling)


def _randomise(model: torch.nn.Module) -> None:
    """Weights large enough to matter, also where transformers starts with 1 (norms) or 0 (biases).

    Layers weigh more than the embedding, so that the newest token does not decide all by itself.
    """
    scales_embedding = "Gemma" in type(model).__name__
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                adds_1 = "Qwen3Next" in type(model).__name__ and "linear_attn" not in name
                parameter.normal_(0.0 if adds_1 else 1.0, 0.2)
            elif scales_embedding and "embed_tokens" in name:
                parameter.normal_(0.0, 0.1)
            elif name.endswith(("bias", "sinks")) or "embed_tokens" in name:
                parameter.normal_(0.0, 0.2)
            else:
                scale = 2.0 if "lm_head" in name else 3.0
                parameter.normal_(0.0, scale * parameter.shape[-1] ** -0.5)
