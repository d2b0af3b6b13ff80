#!/usr/bin/env bash
# llguidance 1.9.1 reads a number bound of 16 digits from a JSON schema as the double next to it:
# under "maximum": 926112073176891.5, which a double holds exactly, 926112073176891.6 is accepted.
# Python's json, and the schema's own text, say .5. Fails once this is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1
"$folder/venv/bin/python" - <<'PY'
import json

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")
schema = {"type": "number", "minimum": 926112073176891, "maximum": 926112073176891.5}
assert json.loads(json.dumps(schema)) == schema
grammar = LLMatcher.grammar_from_json_schema(schema)


def accepts(text: str) -> bool:
    matcher = LLMatcher(tokenizer, grammar)
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


found = {text: accepts(f"926112073176891.{text}") for text in "5678"}
print("llguidance 1.9.1, maximum 926112073176891.5, accepted tenths:", found)
assert found == {"5": True, "6": True, "7": False, "8": False}, "it behaves otherwise now"
PY
