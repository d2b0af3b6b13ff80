"""A tokenizer's vocabulary in the form that matchers need: the bytes of each token, in a tree."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TypeAlias

import llguidance

from pdserve.model_files.tokenizer import read_tokenizer
from pdserve.shared.errors import TokenizerError

Vocabulary: TypeAlias = llguidance.LLTokenizer


def make_vocabulary(
    tokenizer_json: str, num_ids: int | None, end_ids: Collection[int]
) -> Vocabulary:
    """Build a vocabulary. Slow: takes about a second for 150 000 tokens.

    Most of it in two calls, each of which holds the interpreter lock, and not in one twice as long.

    Args:
        tokenizer_json: content of tokenizer.json.
        num_ids: number of token ids of the model, which may exceed the tokenizer's tokens.
        end_ids: tokens allowed where a grammar is complete; must not be empty.

    Raises:
        TokenizerError: `end_ids` is empty, or the tokens cannot be expressed as bytes.
    """
    if not end_ids:
        raise TokenizerError(
            "the model has no end-of-sequence token, which answers with a grammar need to end"
        )
    try:
        plain = llguidance.LLTokenizer(
            tokenizer_json, n_vocab=num_ids, eos_token=sorted(end_ids), slices=[]
        )
        return plain.with_slices(llguidance.LLTokenizer.general_slices())
    except ValueError as error:
        raise TokenizerError(f"grammars cannot be used with this tokenizer: {error}") from error


def load_vocabulary(folder: Path, num_ids: int, end_ids: Collection[int]) -> Vocabulary:
    """Build the vocabulary of a checkpoint folder. Raises TokenizerError."""
    backend, _ = read_tokenizer(folder)
    needed = max(num_ids, 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=0))
    return make_vocabulary(backend.to_str(), needed, end_ids)
