#!/usr/bin/env bash
# bitsandbytes 0.50.2 on a CPU with AVX-512 decodes 4-bit matrices wrongly if their rows are no
# whole number of blocks: its decoder takes blocks to begin with each row, its encoder lets them run
# on. The error doubles, and nothing says so. Shown against the format's own sum, table times scale.
# Fails once this is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  torch==2.13.0 numpy==2.4.6 bitsandbytes==0.50.2
"$folder/venv/bin/python" - <<'PY'
import bitsandbytes.functional as functional
import torch

torch.manual_seed(0)
errors = {}
for shape in [(80, 128), (80, 96)]:
    weight = torch.randn(shape)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    decoded = functional.dequantize_4bit(packed, state)
    codes = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], dim=1).view(-1).long()
    expected = (state.code[codes] * state.absmax.repeat_interleave(64)).view(shape)
    errors[shape[1]] = [round((each - weight).abs().mean().item(), 3) for each in (decoded, expected)]
print("bitsandbytes 0.50.2, blocks of 64, mean error by row width: [decoded, by the format]:", errors)
assert errors[128][0] == errors[128][1], "it behaves otherwise now"
assert errors[96][0] > 1.8 * errors[96][1], "it behaves otherwise now"
PY
