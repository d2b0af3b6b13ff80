"""Incremental detokenisation: the pieces of text add up to the decoding of the whole.

Where tokens are exact bytes (see `pieces`), an incremental UTF-8 decoder returns every character as
soon as its last byte has arrived, and never a part of one. Other tokens are decoded together with
their predecessor, whose text is then removed: `context` holds the tokens shown last, from which the
decoder knows that the text does not start here. Either way the cost of a token does not depend on
the length of the text.

There is one deliberate difference to decoding the whole at once: if a run of byte-fallback tokens
is not valid UTF-8, decoding the whole would replace the entire run, including characters already
shown. Here only the invalid bytes are replaced.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")
_MAX_CONTEXT = 8  # tokens; more than one only while tokens add no text


class IncrementalDetokenizer:
    """The text of one token stream, piece by piece."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        kept_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`kept_ids`: special tokens whose text is kept, since later parsers need it."""
        self._tokenizer = tokenizer
        self._kept_ids = kept_ids
        self.skip_special_tokens = skip_special_tokens
        self._utf8 = _UTF8(errors="replace")
        self._is_inside_character = False
        self._context: list[int] = []
        self._context_text = ""

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is certain now.

        It is often, but not always, the text of this token.
        """
        if self.skip_special_tokens and self._tokenizer.is_special(token_id):
            return self._kept(token_id) if token_id in self._kept_ids else ""
        if not self._is_inside_character:
            whole = self._tokenizer.whole_text(token_id)
            if whole is not None:
                return whole
        piece = self._tokenizer.exact_bytes(token_id)
        if piece is None:
            return self.finish() + self._push_behind_context(token_id)
        if self._tokenizer.is_byte_level or not piece:
            return self._decode_bytes(piece)
        return self._push_fallback_byte(token_id, piece)

    def _kept(self, token_id: int) -> str:
        return self.finish() + self._decode([token_id])

    def finish(self) -> str:
        """End the stream; an incomplete character is returned as U+FFFD."""
        self._is_inside_character = False
        return self._utf8.decode(b"", final=True)

    def _decode_bytes(self, piece: bytes) -> str:
        text = self._utf8.decode(piece)
        self._is_inside_character = bool(self._utf8.getstate()[0])
        return text

    def _push_behind_context(self, token_id: int) -> str:
        text = self._decode([*self._context, token_id])
        delta = text[len(self._context_text) :]
        if delta:
            self._set_context([token_id])
        else:  # e.g. a first token that is a single space: later tokens need it as context
            self._set_context([*self._context, token_id][-_MAX_CONTEXT:])
        return delta

    def _push_fallback_byte(self, token_id: int, piece: bytes) -> str:
        is_first = not self._context
        self._set_context([token_id])
        text = self._decode_bytes(piece)
        if is_first and text:  # the decoder may drop a space at the start of a text
            return self._context_text
        return text

    def _set_context(self, token_ids: list[int]) -> None:
        self._context = token_ids
        self._context_text = self._decode(token_ids)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
