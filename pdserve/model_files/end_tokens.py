"""The tokens that end an answer, which up to three files of a checkpoint name.

Checkpoints disagree with themselves: a fine-tuned chat model often has its end of turn only in
tokenizer_config.json, and the base model's end of text in the other two. All of them end answers.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.model_files.checkpoint import Checkpoint
from pdserve.model_files.gguf.tokenizer import end_ids
from pdserve.model_files.git_lfs import refuse_pointer
from pdserve.model_files.tokenizer import TokenizerConfig
from pdserve.shared.errors import ModelError

_WITH_IDS = ("config.json", "generation_config.json")
_WITH_TEXT = "tokenizer_config.json"


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    vocab: Any = None


class _Tokenizer(msgspec.Struct):
    """What tokenizer.json has to say; its vocabulary is parsed only if nothing else says it."""

    added_tokens: list[_AddedToken] = []
    model: msgspec.Raw = msgspec.Raw(b"{}")


def end_tokens(checkpoint: Checkpoint) -> dict[int, list[str]]:
    """Return token id |-> the files that name it, or the keys of a GGUF file.

    Raises:
        ModelError: a file is not what it should be.
        TokenizerError: likewise, of the tokenizer's files.
    """
    if (gguf := checkpoint.gguf) is not None:
        return end_ids(gguf)
    found: dict[int, list[str]] = {}
    for name in _WITH_IDS:
        for token_id in token_ids((checkpoint.read_json(name) or {}).get("eos_token_id")):
            found.setdefault(token_id, []).append(name)
    text = TokenizerConfig.load(checkpoint.path).named_special_tokens.get("eos_token")
    of_text = None if text is None else _id_of(text, checkpoint)
    if of_text is not None:
        found.setdefault(of_text, []).append(_WITH_TEXT)
    return found


def described(found: dict[int, list[str]]) -> str:
    """Return the tokens that end an answer, for the log."""
    if not found:
        return "no token: answers end at their limits only"
    return ", ".join(f"token {i} ({' and '.join(found[i])})" for i in sorted(found))


def token_ids(value: object) -> frozenset[int]:
    """Return the token ids of a field that holds one id, a list of ids, or null."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelError(f"eos_token_id is {value!r}; it must be a token id or a list of them")
    return frozenset(ids)


def _id_of(text: str, checkpoint: Checkpoint) -> int | None:
    """Return the id of a token's text; None if the tokenizer has no such token."""
    file = checkpoint.path / "tokenizer.json"
    if not file.is_file():
        return None  # the coordinator says so, where it matters
    try:
        tokenizer = msgspec.json.decode(file.read_bytes(), type=_Tokenizer)
        for token in tokenizer.added_tokens:
            if token.content == text:
                return token.id
        vocab = msgspec.json.decode(tokenizer.model, type=_Vocabulary).vocab
    except msgspec.MsgspecError as error:
        refuse_pointer(file)
        raise ModelError(f"{file} is not a tokenizer's: {error}") from error
    if isinstance(vocab, list):  # of Unigram: [text, score]
        vocab = {piece[0]: i for i, piece in enumerate(vocab)}
    return vocab.get(text) if isinstance(vocab, dict) else None
