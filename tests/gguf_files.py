"""Checkpoints as GGUF files, written by the `gguf` package, and the weights that they then hold.

    as_gguf(make_checkpoint(tmp_path / "m", "llama"), tmp_path / "m.gguf", lambda name: "Q8_0")

What is not encoded by that package (K-quants) has random codes, and scales that are small.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.model_files.gguf.names import place_of

gguf: Any = pytest.importorskip("gguf")  # of the test extra: the format's own package

_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "phi3": "phi3",
    "granite": "granite",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "smollm3": "smollm3",
    "glm4": "glm4",
    "cohere2": "cohere2",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
# Where a block of a K-quant has its scales, which are float16.
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_SCALES |= {"IQ4_NL": (0,), "IQ4_XS": (0,)}
_STACK = re.compile(r"(.+)\.experts\.(gate_up|down)_proj(_bias)?")

Tensors = dict[str, torch.Tensor]
Values = np.ndarray[Any, np.dtype[np.float32]]


def random_blocks(kind: str, num_blocks: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Bytes of blocks whose values are about 1: [num_blocks, bytes of one]."""
    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (num_blocks, num_bytes), dtype=np.uint8)
    for place in _SCALES[kind]:
        scales = random.uniform(1e-4, 4e-4, (num_blocks, 1)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8)
    return blocks


def as_gguf(
    checkpoint: Path,
    file: Path,
    type_of: Callable[[str], str],
    *,
    extra: Callable[[Any], None] = lambda writer: None,
    splits_heads: bool = True,
) -> Path:
    """Write a checkpoint as `file`, and what it then holds as a checkpoint: its folder.

    Args:
        checkpoint: as tests.checkpoints makes it.
        file: to write.
        type_of: the type of a matrix by its name in GGUF.
        extra: writes further keys and tensors.
        splits_heads: of latent attention, as files have them since May 2025.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, architecture)
    _write_config(writer, config)
    if architecture == "deepseek2":
        _write_latent(writer, config, splits_heads)
    else:
        _write_sizes_of_heads(writer, config)
    _write_tokenizer(writer, checkpoint, config)
    held: Tensors = {}
    stored = _each_expert(load_file(checkpoint / "model.safetensors"))
    if architecture == "deepseek2" and splits_heads:
        stored = _split_heads(stored, config)
    for name, (values, parts) in _tensors(architecture, stored).items():
        heads = _permuted_heads(config, architecture, name)
        is_matrix = values.ndim > 1 and "ffn_gate_inp" not in name and name[-4:] != "bias"
        kind = type_of(name) if is_matrix else "F32"
        offset = 1 if architecture.startswith("gemma") and "norm" in name else 0
        data, decoded = _encoded(kind, _permuted(values + offset, heads))
        data = data[0] if "shexp" in name and len(data) == 1 else data
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
        whole = torch.from_numpy(_restored(decoded, heads)) - offset
        for index, part in enumerate(parts):
            held[part] = (whole[index] if len(parts) > 1 else whole).clone()
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = file.with_suffix("")
    folder.mkdir()
    for each in checkpoint.iterdir():
        if each.suffix != ".safetensors":
            (folder / each.name).write_bytes(each.read_bytes())
    save_file(_joined_heads(held), folder / "model.safetensors")
    return folder


def _split_heads(stored: Tensors, config: dict[str, Any]) -> Tensors:
    """Of latent attention: all heads' keys, [heads, rank, size], and values."""
    made: Tensors = {}
    for name, values in stored.items():
        if not name.endswith("kv_b_proj.weight"):
            made[name] = values
            continue
        of_heads = values.unflatten(0, (config["num_attention_heads"], -1))
        size = config["qk_nope_head_dim"]
        made[name.replace("kv_b", "k_b")] = of_heads[:, :size].mT.contiguous()
        made[name.replace("kv_b", "v_b")] = of_heads[:, size:].contiguous()
    return made


def _joined_heads(stored: Tensors) -> Tensors:
    """Undo that."""
    made = {}
    for name, values in stored.items():
        if name.endswith("k_b_proj.weight"):
            both = [values.mT, stored[name.replace("k_b", "v_b")]]
            made[name.replace("k_b", "kv_b")] = torch.cat(both, dim=1).flatten(0, 1)
        elif not name.endswith(".v_b_proj.weight"):
            made[name] = values
    return made


def _tensors(architecture: str, stored: Tensors) -> dict[str, tuple[Values, list[str]]]:
    """Name in GGUF |-> values, and the names of its parts, which are experts if several."""
    parts: dict[str, list[tuple[int, str]]] = {}
    for name in stored:
        place = place_of(name, architecture)
        parts.setdefault(place.name, []).append((place.expert or 0, name))
    made = {}
    for name, numbered in parts.items():
        names = [part for _, part in sorted(numbered)]
        values = [stored[part].float().numpy() for part in names]
        made[name] = (np.stack(values) if len(values) > 1 else values[0], names)
    return made


def _each_expert(stored: Tensors) -> Tensors:
    """Of gpt-oss, whose experts are stacks: [experts, inputs, outputs], gates and ups in turns."""
    made: Tensors = {}
    for name, values in stored.items():
        if (match := _STACK.fullmatch(name)) is None:
            made[name] = values
            continue
        block, which, kind = match[1], match[2], "bias" if match[3] else "weight"
        fused = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
        parts = fused if which == "gate_up" else {which: slice(None)}
        for number, own in enumerate(values if match[3] else values.mT):
            for part, rows in parts.items():
                made[f"{block}.experts.{number}.{part}_proj.{kind}"] = own[rows].contiguous()
    return made


def _permuted_heads(config: dict[str, Any], architecture: str, name: str) -> int:
    if architecture not in ("llama", "granite", "smollm3"):
        return 0
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    key = heads.get(name.split(".")[-2])
    return 0 if key is None else config[key]


def _permuted(values: Values, num_heads: int) -> Values:
    if not num_heads:
        return values
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _restored(values: Values, num_heads: int) -> Values:
    if not num_heads:
        return values
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))


def _encoded(kind: str, values: Values) -> tuple[np.ndarray[Any, Any], Values]:
    """The bytes, [..., bytes of a row], and what they stand for."""
    number = gguf.GGMLQuantizationType[kind]
    if kind in _SCALES:
        elements, _ = gguf.GGML_QUANT_SIZES[number]
        blocks = random_blocks(kind, values.size // elements, seed=values.size)
        data = blocks.reshape(*values.shape[:-1], -1)
    else:
        data = gguf.quants.quantize(values, number)
    decoded = gguf.quants.dequantize(data, number)
    return data, np.asarray(decoded, np.float32).reshape(values.shape)


def _write_config(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if config["model_type"] == "cohere2":
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    if (factor := rope.get("factor")) is not None and rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(factor)
    if config["model_type"].startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
        if cap := config["attn_logit_softcapping"]:
            writer.add_attn_logit_softcapping(cap)
        if cap := config["final_logit_softcapping"]:
            writer.add_final_logit_softcapping(cap)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if (factor := rope.get("attention_factor")) is not None:
            writer.add_rope_scaling_yarn_attn_factor(factor)
        if (all_dim := rope.get("mscale_all_dim")) is not None:
            writer.add_rope_scaling_yarn_log_mul(0.1 * all_dim)
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if width := config.get("moe_intermediate_size"):
            writer.add_expert_feed_forward_length(width)


def _write_sizes_of_heads(writer: Any, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.get("rope_parameters") or {}
    _write_own(writer, config, rope.get("full_attention", rope), head_dim)


def _write_latent(writer: Any, config: dict[str, Any], splits_heads: bool) -> None:
    """Keys of DeepSeek's files, as llama.cpp's converter writes them; without a split, wrote."""
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    query, value = config["qk_nope_head_dim"] + rope, config["v_head_dim"]
    writer.add_head_count_kv(1 if splits_heads else config["num_attention_heads"])
    writer.add_key_length(rank + rope if splits_heads else query)
    writer.add_value_length(rank if splits_heads else value)
    if splits_heads:
        writer.add_key_length_mla(query)
        writer.add_value_length_mla(value)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rope)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config.get("norm_topk_prob", True))


def _write_own(writer: Any, config: dict[str, Any], rope: dict[str, Any], head_dim: int) -> None:
    """Keys of few architectures, as llama.cpp's converter writes them."""
    if (share := rope.get("partial_rotary_factor")) is not None:
        writer.add_rope_dimension_count(int(head_dim * share))
    match config["model_type"]:
        case "granite":
            writer.add_attention_scale(config["attention_multiplier"])
            writer.add_embedding_scale(config["embedding_multiplier"])
            writer.add_residual_scale(config["residual_multiplier"])
            writer.add_logit_scale(config["logits_scaling"])
        case "gpt_oss":
            writer.add_sliding_window(config["sliding_window"])
        case "cohere2":
            writer.add_logit_scale(config["logit_scale"])
            writer.add_sliding_window(config["sliding_window"])
            writer.add_rope_dimension_count(head_dim)
            writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        case "olmo3":
            kinds = config["layer_types"]
            writer.add_sliding_window(config["sliding_window"])
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
            own = config["rope_parameters"]["sliding_attention"]
            writer.add_float32("olmo2.rope.freq_base_swa", own["rope_theta"])
        case "qwen2_moe":
            width = config["shared_expert_intermediate_size"]
            writer.add_expert_shared_feed_forward_length(width)
        case "phi3":
            original = config["original_max_position_embeddings"]
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_sliding_window(0)
            for kind in ("long", "short"):
                if factors := rope.get(f"{kind}_factor"):
                    name = f"rope_factors_{kind}.weight"
                    writer.add_tensor(name, np.array(factors, np.float32))


def _write_tokenizer(writer: Any, checkpoint: Path, config: dict[str, Any]) -> None:
    read = json.loads((checkpoint / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in read["added_tokens"]}
    ids = {number: text for text, number in (read["model"]["vocab"] | special).items()}
    count = config["vocab_size"]
    kinds = [5 if i not in ids else 3 if ids[i] in special else 1 for i in range(count)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([ids.get(i, f"[PAD{i}]") for i in range(count)])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in read["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    writer.add_chat_template(settings["chat_template"])
