#!/usr/bin/env bash
# transformers 5.24.0 no longer heeds "add_bos_token": true of tokenizer_config.json where
# tokenizer.json has a post-processor, as DeepSeek V3's has: 4.57.6 began each text with it. So
# completions of raw texts begin otherwise, also here. Fails once this is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/show.py" <<'PY'
import json
import sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

folder = Path(sys.argv[1])
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE({text: i for i, text in enumerate(["<s>", *alphabet])}, []))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
made.post_processor = processors.ByteLevel(trim_offsets=False)
made.add_special_tokens(["<s>"])
made.save(str(folder / "tokenizer.json"))
config = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "add_bos_token": True}
(folder / "tokenizer_config.json").write_text(json.dumps(config))
(folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
tokens = transformers.AutoTokenizer.from_pretrained(str(folder))("Hi").tokens()
print(f"transformers {transformers.__version__}, add_bos_token true:", tokens)
begin = ["<s>"] if sys.argv[2] == "adds" else []
assert tokens == [*begin, "H", "i"], "it behaves otherwise now"
PY
for one in 4.57.6:adds 5.24.0:adds-none; do
  venv="$folder/${one%:*}"
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check "transformers==${one%:*}"
  "$venv/bin/python" "$folder/show.py" "$folder" "${one#*:}"
done
