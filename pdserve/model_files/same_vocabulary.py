"""Whether two checkpoints name the same tokens by the same ids."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers

from pdserve.model_files.tokenizer import read_tokenizer
from pdserve.shared.errors import ModelError


def check_same_vocabulary(own: Path, other: Path) -> None:
    """Check it. Models may have further ids, which stand for nothing. `own`: of the model.

    Raises:
        ModelError: they do not; with the first difference.
        TokenizerError: one has no tokenizer that can be read.
    """
    one, two = read_tokenizer(own)[0], read_tokenizer(other)[0]
    here, there = _tokens(one), _tokens(two)
    for token_id in sorted({*here, *there}):
        if here.get(token_id) != there.get(token_id):
            raise ModelError(
                f"its vocabulary is not that of the model: token {token_id} is "
                f"{_shown(there.get(token_id))}, there it is {_shown(here.get(token_id))}"
            )
    if _decoding(one) != _decoding(two):
        raise ModelError("its vocabulary is not that of the model: tokens are other bytes")


def _tokens(tokenizer: tokenizers.Tokenizer) -> dict[int, str]:
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}


def _decoding(tokenizer: tokenizers.Tokenizer) -> object:
    """What makes bytes of tokens."""
    return json.loads(tokenizer.to_str()).get("decoder")


def _shown(token: str | None) -> str:
    return "nothing" if token is None else json.dumps(token, ensure_ascii=False)
