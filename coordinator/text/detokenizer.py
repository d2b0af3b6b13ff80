"""Incremental detokenisation: the pieces of text add up to the decoding of the whole.

Where tokens are exact bytes (see below), an incremental UTF-8 decoder returns every character as
soon as its last byte has arrived, and never a part of one. Other tokens are decoded together with
their predecessor, whose text is then removed: `context` holds the tokens shown last, from which the
decoder knows that the text does not start here. Either way the cost of a token does not depend on
the length of the text.

There is one deliberate difference to decoding the whole at once: if a run of byte-fallback tokens
is not valid UTF-8, decoding the whole would replace the entire run, including characters already
shown. Here only the invalid bytes are replaced.

`TokenPieces` are the bytes that single tokens stand for. In two families of tokenizers a token may
be a part of a character, and its bytes are exact:

* byte-level BPE (GPT-2, Llama 3, Qwen): every byte has a printable stand-in character;
* byte fallback (SentencePiece): tokens `<0x00>` .. `<0xFF>` for what the vocabulary lacks.

The text of all other tokens depends on the tokens before it: for example, SentencePiece drops a
leading space at the start of a text.

`StopMatcher` shows text as early as possible: it holds back only what may be the beginning of a
stop string. How the text is cut into pieces makes no difference: the match that is completed first
wins, and among several that end at the same character the longest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import tokenizers

from pdserve._native import PieceTable, TextDecoder

_FALLBACK_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_of_character() -> dict[str, int]:
    """Return the byte-level alphabet: printable Latin-1 as itself, other bytes as 256, 257, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    own = {chr(byte): byte for byte in printable}
    return own | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenPieces:
    """token id |-> the bytes it stands for."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self.special_ids = special_ids
        self._backend = backend
        kinds = _decoder_kinds(backend)
        self.is_byte_level = kinds == ["ByteLevel"]
        self._has_byte_fallback = "ByteFallback" in kinds
        self._alphabet = _byte_of_character() if self.is_byte_level else {}
        self.table = PieceTable()  # of a byte-level tokenizer: what `exact` has found
        self._exact: dict[int, bytes | None] = {}
        self._whole: dict[int, str | None] = {}

    def exact(self, token_id: int) -> bytes | None:
        """Return the token's bytes in any position; None if they depend on the preceding tokens."""
        try:
            return self._exact[token_id]
        except KeyError:
            piece = self._exact[token_id] = self._find_exact(token_id)
            return piece

    def whole(self, token_id: int) -> str | None:
        """Return the token's text if it is exact and consists of whole characters; else None."""
        try:
            return self._whole[token_id]
        except KeyError:
            piece = self.exact(token_id) if self.is_byte_level else None
            text = self._whole[token_id] = _decoded(piece) if piece is not None else None
            return text

    def shown(self, token_id: int) -> bytes:
        """Return the token's bytes in the middle of a text."""
        piece = self.exact(token_id)
        if piece is not None:
            return piece
        alone = self._backend.decode([token_id], skip_special_tokens=False)
        twice = self._backend.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(alone) :].encode()

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of several tokens."""
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _find_exact(self, token_id: int) -> bytes | None:
        token = self._backend.id_to_token(token_id)
        if token is None:  # beyond the vocabulary: models pad their embeddings
            return b""
        if self.is_byte_level:
            piece = self._byte_level_piece(token)
            self.table.add(token_id, piece, token_id in self.special_ids)
            return piece
        if self._has_byte_fallback and (match := _FALLBACK_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return None

    def _byte_level_piece(self, token: str) -> bytes:
        values = [self._alphabet.get(char) for char in token]
        known = [value for value in values if value is not None]
        return bytes(known) if len(known) == len(values) else token.encode()


def _decoded(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    """Return the type name of the decoder, or of each part of a sequence of decoders."""
    if backend.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [part["type"] for part in parts]


_MAX_CONTEXT = 8  # tokens; more than one only while tokens add no text


class IncrementalDetokenizer:
    """The text of one token stream, piece by piece."""

    def __init__(
        self,
        pieces: TokenPieces,
        *,
        skip_special_tokens: bool = True,
        kept_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`kept_ids`: special tokens whose text is kept, since later parsers need it."""
        self._pieces = pieces
        self._kept_ids = kept_ids
        self.skip_special_tokens = skip_special_tokens
        self._utf8 = TextDecoder(pieces.table, skip_special_tokens, bool(kept_ids))
        self._context: list[int] = []
        self._context_text = ""

    @property
    def decoder(self) -> TextDecoder | None:
        """What may take tokens in place of `push`; None: some depend on those before them."""
        return self._utf8 if self._pieces.is_byte_level else None

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is certain now.

        It is often, but not always, the text of this token.
        """
        if self.skip_special_tokens and token_id in self._pieces.special_ids:
            if token_id in self._kept_ids:
                return self._kept(token_id)
            self._pieces.exact(token_id)  # noted for the decoder, which skips it too
            return ""
        if not self._utf8.is_inside_character:
            whole = self._pieces.whole(token_id)
            if whole is not None:
                return whole
        piece = self._pieces.exact(token_id)
        if piece is None:
            return self.finish() + self._push_behind_context(token_id)
        if self._pieces.is_byte_level or not piece:
            return self._utf8.decode(piece)
        return self._push_fallback_byte(token_id, piece)

    def _kept(self, token_id: int) -> str:
        return self.finish() + self._pieces.decode([token_id])

    def finish(self) -> str:
        """End the stream; an incomplete character is returned as U+FFFD."""
        return self._utf8.finish()

    def _push_behind_context(self, token_id: int) -> str:
        text = self._pieces.decode([*self._context, token_id])
        delta = text[len(self._context_text) :]
        if delta:
            self._set_context([token_id])
        else:  # e.g. a first token that is a single space: later tokens need it as context
            self._set_context([*self._context, token_id][-_MAX_CONTEXT:])
        return delta

    def _push_fallback_byte(self, token_id: int, piece: bytes) -> str:
        is_first = not self._context
        self._set_context([token_id])
        text = self._utf8.decode(piece)
        if is_first and text:  # the decoder may drop a space at the start of a text
            return self._context_text
        return text

    def _set_context(self, token_ids: list[int]) -> None:
        self._context = token_ids
        self._context_text = self._pieces.decode(token_ids)


class StopMatcher:
    """Passes text through, up to the first stop string."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if not all(stops):
            raise ValueError("an empty stop string would match everywhere")
        self._stops = [_PartialMatch(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found; None if none was."""
        return self._matched

    def push(self, text: str) -> str:
        """Take the next piece; return the text that may be shown now: "" after a match."""
        if self._matched is not None:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            completed = [partial.stop for partial in self._stops if partial.advance(char)]
            if completed:
                self._matched = max(completed, key=len)
                self._held = ""
                return held[: end if self._include_stop else end - len(self._matched)]
        num_held = max(partial.length for partial in self._stops)
        self._held = held[len(held) - num_held :]
        return held[: len(held) - num_held]

    def finish(self) -> str:
        """End the text; return what was held back."""
        held, self._held = self._held, ""
        return held


class _PartialMatch:
    """Knuth-Morris-Pratt state: the longest prefix of `stop` that the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._fallback = _fallback_table(stop)

    def advance(self, char: str) -> bool:
        """Take one character; True when it completes the stop string."""
        while self.length and self.stop[self.length] != char:
            self.length = self._fallback[self.length - 1]
        if self.stop[self.length] == char:
            self.length += 1
        return self.length == len(self.stop)


def _fallback_table(stop: str) -> list[int]:
    """Return, for each i, the length of the longest proper prefix of stop[: i + 1] that is also its
    suffix."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[length] != stop[i]:
            length = table[length - 1]
        if stop[length] == stop[i]:
            length += 1
        table[i] = length
    return table
