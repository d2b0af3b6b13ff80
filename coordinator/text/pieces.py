"""The bytes that single tokens stand for: token id |-> bytes.

In two families of tokenizers a token may be a part of a character, and its bytes are exact:

* byte-level BPE (GPT-2, Llama 3, Qwen): every byte has a printable stand-in character;
* byte fallback (SentencePiece): tokens `<0x00>` .. `<0xFF>` for what the vocabulary lacks.

The text of all other tokens depends on the tokens before it: for example, SentencePiece drops a
leading space at the start of a text.
"""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

_FALLBACK_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_of_character() -> dict[str, int]:
    """Return the byte-level alphabet: printable Latin-1 as itself, other bytes as 256, 257, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    own = {chr(byte): byte for byte in printable}
    return own | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenPieces:
    """token id |-> the bytes it stands for."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        kinds = _decoder_kinds(backend)
        self.is_byte_level = kinds == ["ByteLevel"]
        self._has_byte_fallback = "ByteFallback" in kinds
        self._alphabet = _byte_of_character() if self.is_byte_level else {}
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

    def _find_exact(self, token_id: int) -> bytes | None:
        token = self._backend.id_to_token(token_id)
        if token is None:  # beyond the vocabulary: models pad their embeddings
            return b""
        if self.is_byte_level:
            values = [self._alphabet.get(char) for char in token]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode()
        if self._has_byte_fallback and (match := _FALLBACK_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return None


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
