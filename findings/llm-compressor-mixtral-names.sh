#!/usr/bin/env bash
# llm-compressor 0.14.0.1 writes Mixtral's experts as block_sparse_moe.experts.0.gate_proj, a name
# between that of older checkpoints (block_sparse_moe.experts.0.w1) and that of other experts
# (mlp.experts.0.gate_proj). transformers 5.17.0, which it comes with, then starts from random
# experts: a table of the log lists them as missing. Qwen3 MoE, done alike, is read back well.
# Fails once this is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile \
  torch==2.13.0 transformers==5.17.0 compressed-tensors==0.19.0 llmcompressor==0.14.0.1
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2>"$folder/log" <<'PY' || { cat "$folder/log"; exit 1; }
import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors import safe_open
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

torch.manual_seed(0)
sizes = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 256, "num_hidden_layers": 1}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
families = {
    "mixtral": MixtralConfig(**sizes, **heads, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**sizes, **heads, moe_intermediate_size=128, num_experts=4),
}
gate = "experts.0.gate_proj.weight_packed"
names, errors = {}, {}
for family, config in families.items():
    AutoModelForCausalLM.from_config(config).save_pretrained(f"{family}-plain")
    model = AutoModelForCausalLM.from_pretrained(f"{family}-plain")
    experts = model.model.layers[0].mlp.experts.down_proj.detach().clone()
    ignored = ["lm_head", "re:.*gate$"]
    oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme="W4A16", ignore=ignored))
    model.save_pretrained(family)
    with safe_open(f"{family}/model.safetensors", "pt") as file:
        names[family] = [name for name in file.keys() if name.endswith(gate)]
    loaded = AutoModelForCausalLM.from_pretrained(family).model.layers[0].mlp.experts.down_proj
    errors[family] = round(((loaded - experts).norm() / experts.norm()).item(), 2)
print("llm-compressor 0.14.0.1, W4A16, names:", names, "relative error once read back:", errors)
assert names["mixtral"] == [f"model.layers.0.block_sparse_moe.{gate}"], "it behaves otherwise now"
assert errors["qwen3_moe"] < 0.2, "it behaves otherwise now"
assert errors["mixtral"] > 1, "it behaves otherwise now"
PY
