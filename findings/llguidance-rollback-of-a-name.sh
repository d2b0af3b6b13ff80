#!/usr/bin/env bash
# llguidance 1.9.1: a matcher of JSON goes along the token `{"` where a value is due, and is rolled
# back. If the value then begins with the token ` "`, it is taken for the name of the object that
# was given up: the mask allows `":` and not `"}`. One that never went along, or a copy of it
# (`deep_copy`), does the opposite, as the grammar says. Fails once this is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile llguidance==1.9.1
"$folder/venv/bin/python" - <<'PY'
import json

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

WORDS = [b'{"', b"output", b'":', b' "', b'"}', b"<end>"]
BEGIN, NAME, COLON, VALUE, CLOSE, END = range(256, 256 + len(WORDS))


class Vocabulary:
    eos_token_id = END
    bos_token_id = None
    special_token_ids = [END]
    tokens = [bytes([byte]) for byte in range(256)] + WORDS

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


tokenizer = LLTokenizer(TokenizerWrapper(Vocabulary()))
grammar = json.dumps({"grammars": [{"json_schema": {"type": "object"}}]})


def after_value_begins(guessed):
    matcher = LLMatcher(tokenizer, grammar)
    assert matcher.consume_tokens([BEGIN, NAME, COLON])
    for token in guessed:
        assert matcher.consume_token(token)
    if guessed:
        matcher.compute_bitmask()
        assert matcher.rollback(len(guessed))
    assert matcher.consume_token(VALUE)
    mask = matcher.compute_bitmask()
    return [token for token in (COLON, CLOSE) if mask[token // 8] >> token % 8 & 1]


never, rolled_back = after_value_begins([]), after_value_begins([BEGIN])
print("llguidance 1.9.1, after a value's ` \"`:", {"never": never, "rolled back": rolled_back})
assert never == [CLOSE], "it behaves otherwise now"
assert rolled_back == [COLON], "it behaves otherwise now"
PY
