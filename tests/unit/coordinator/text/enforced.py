"""What a schema lets through, token by token, as a node would."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import llguidance
import tokenizers

from coordinator.text.grammars import AnswerGrammar, Output, OutputKind
from pdserve.grammar import Vocabulary, make_vocabulary, new_matcher
from tests.unit.coordinator.text import made_tokenizers as made

END = 0


@cache
def _backend() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(made.byte_level_json())


@cache
def vocabulary() -> Vocabulary:
    """Of single bytes, and a few longer tokens."""
    return make_vocabulary(made.byte_level_json(), _backend().get_vocab_size(), [END])


class Enforced:
    """A schema at the beginning of an answer. Raises what a client would be told."""

    def __init__(self, schema: Any, param: str = "schema") -> None:
        self.grammar = AnswerGrammar(Output(OutputKind.JSON, schema, param)).text()
        self._matcher = new_matcher(vocabulary(), self.grammar)

    def takes(self, text: str) -> bool:
        """Whether this may be a whole answer."""
        matcher = self._matcher.deep_copy()
        ids = _backend().encode(text, add_special_tokens=False).ids
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    def takes_value(self, value: Any) -> bool:
        """Whether the value may be an answer."""
        return self.takes(json.dumps(value, ensure_ascii=False))

    def favouring(self, liked: str, most: int) -> str:
        """The answer of a model that writes the first of these characters that it may.

        It ends only where it must, or if none of them is allowed and it may.
        """
        matcher, text = self._matcher.deep_copy(), ""
        for _ in range(most):
            if (token_id := _best(matcher, liked)) is None:
                break
            matcher.consume_token(token_id)
            text += _backend().decode([token_id], skip_special_tokens=False)
        return text


def _best(matcher: llguidance.LLMatcher, liked: str) -> int | None:
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    for char in liked:
        token_id = _backend().token_to_id(char)
        if mask >> token_id & 1:
            return int(token_id)
    if matcher.is_accepting() or matcher.is_stopped():
        return None
    return (mask & -mask).bit_length() - 1
