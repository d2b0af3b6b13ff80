#!/usr/bin/env bash
# llm-compressor 0.14.0.1 quantises token embeddings where a recipe targets them, and transformers
# 5.17.0, which it comes with, cannot read what it wrote, dequantized or not: it begins by setting
# weights to random numbers, and a packed embedding has no `weight`. Packed Linear layers are read.
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
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig

torch.manual_seed(0)
sizes = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 256, "num_hidden_layers": 1}
config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
AutoModelForCausalLM.from_config(config).save_pretrained("plain")
packed = "model.embed_tokens.weight_packed"
tensors, results = {}, {}
for targets in (["Linear"], ["Linear", "Embedding"]):
    case = targets[-1]
    model = AutoModelForCausalLM.from_pretrained("plain")
    oneshot(model=model, recipe=QuantizationModifier(targets=targets, scheme="W8A16"))
    model.save_pretrained(case)
    with safe_open(f"{case}/model.safetensors", "pt") as file:
        tensors[case] = set(file.keys())
    for dequantize in (False, True):
        how = CompressedTensorsConfig(dequantize=dequantize)
        try:
            AutoModelForCausalLM.from_pretrained(case, quantization_config=how)
            results[case, dequantize] = "read"
        except AttributeError as error:
            results[case, dequantize] = str(error)
print("llm-compressor 0.14.0.1, W8A16, by targets and whether dequantized:", results)
assert packed in tensors["Embedding"] - tensors["Linear"], "it behaves otherwise now"
lacks = "'Embedding' object has no attribute 'weight'"
for dequantize in (False, True):
    assert results["Linear", dequantize] == "read", "it behaves otherwise now"
    assert results["Embedding", dequantize] == lacks, "it behaves otherwise now"
PY
