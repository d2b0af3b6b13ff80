"""The tokens in a GGUF file: texts, types, scores, and which of them have names."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Final

from tokenizers import AddedToken

from pdserve.model_files.gguf.charsmap import fault_of
from pdserve.model_files.gguf.fields import GgufFields
from pdserve.model_files.gguf.model import GgufModel
from pdserve.shared.errors import TokenizerError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens

PREFIX: Final = "tokenizer.ggml."
_NAMED: Final = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",  # the format spells it so
    "pad": "padding_token_id",
    "mask": "mask_token_id",
}
# Of kinds of tokenizers whose files may leave them out.
_DEFAULT_IDS: Final[dict[str, dict[str, int]]] = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
    "t5": {"eos_token_id": 1, "unknown_token_id": 2, "padding_token_id": 0},
}


class Vocabulary:
    """What all kinds of tokenizers need of the file."""

    def __init__(self, model: GgufModel) -> None:
        self.fields = GgufFields(model.values, model.path).under(PREFIX)
        self.where = str(model.path)
        self.tokens = self.fields.texts("tokens")
        if "" in self.tokens:
            self.tokens = [text or f"[EMPTY_{number}]" for number, text in enumerate(self.tokens)]
        self.types = self._each("token_type", int, NORMAL)

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token |-> id. Raises TokenizerError: two ids have the same text."""
        ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        if len(ids) < len(self.tokens):
            twice = next(t for number, t in enumerate(self.tokens) if ids[t] != number)
            raise TokenizerError(f"{self.where} has the token {twice!r} twice")
        return ids

    def scores(self) -> list[float]:
        """Of all tokens."""
        if "scores" not in self.fields:
            raise TokenizerError(f"{self.where} lacks {PREFIX}scores, which this tokenizer needs")
        scores = self._each("scores", float, 0.0)
        if not all(map(math.isfinite, scores)):
            raise self.fields.error("scores", "a list of finite numbers")
        return scores

    def merges(self) -> list[tuple[str, str]]:
        """Of BPE, those of the highest rank first."""
        merges = []
        for merge in self.fields.texts("merges"):
            # A token may begin with a space.
            space = merge.find(" ", 1)
            if space < 0:
                raise TokenizerError(
                    f"{self.where}: {PREFIX}merges has {merge!r}, which are not two tokens"
                )
            merges.append((merge[:space], merge[space + 1 :]))
        return merges

    def charsmap(self) -> bytes:
        """What texts are normalised by (`charsmap.py`); b"": nothing."""
        values = self._numbers("precompiled_charsmap", int)
        if not values:
            return b""
        charsmap = bytes(value & 0xFF for value in values)
        if fault := fault_of(charsmap):
            raise TokenizerError(
                f"{self.where}: {PREFIX}precompiled_charsmap is damaged: {fault}; fetch it again"
            )
        return charsmap

    def named(self) -> dict[str, str]:
        """Name of a special token, such as bos_token |-> its text."""
        defaults = _DEFAULT_IDS.get(self.fields.text("model"), {})
        found: dict[str, str] = {}
        for name, key in _NAMED.items():
            token_id = self.id_of(key)
            token_id = defaults.get(key) if token_id is None else token_id
            if token_id is not None and token_id < len(self.tokens):
                found[f"{name}_token"] = self.tokens[token_id]
        return found

    def default_end(self) -> int | None:
        """The token that ends texts where the file names none; None: it does, or there is none."""
        token_id = _DEFAULT_IDS.get(self.fields.text("model"), {}).get("eos_token_id")
        if token_id is None or "eos_token_id" in self.fields or token_id >= len(self.tokens):
            return None
        return token_id if self.types[token_id] == CONTROL else None

    def id_of(self, key: str) -> int | None:
        """The token that a key names; None: it names none."""
        if key not in self.fields:
            return None
        token_id = self.fields.integer(key, minimum=0)
        if token_id >= len(self.tokens):
            raise self.fields.error(key, f"one of the {len(self.tokens)} tokens")
        return token_id

    def added(self) -> list[AddedToken]:
        """Tokens that are found in a text before all else; control tokens are special."""
        return [
            AddedToken(text, special=kind == CONTROL, normalized=False)
            for text, kind in zip(self.tokens, self.types, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]

    def _each(self, key: str, kind: type[Any], default: Any) -> list[Any]:
        values = self._numbers(key, kind)
        if values is None:
            return [default] * len(self.tokens)
        if len(values) != len(self.tokens):
            raise TokenizerError(
                f"{self.where}: {PREFIX}{key} has {len(values)} values for {len(self.tokens)} "
                "tokens"
            )
        return values

    def _numbers(self, key: str, kind: type[Any]) -> list[Any] | None:
        values = self.fields.raw(key)
        if values is None:
            return None
        if not isinstance(values, list) or not {*map(type, values)} <= {int, bool, kind}:
            raise self.fields.error(key, "a list of numbers")
        return values
