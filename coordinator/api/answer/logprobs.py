"""Converts log-probabilities to the formats of chat and text completions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from coordinator.api.answer.bodies import (
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
)
from coordinator.api.answer.choice import ScoredToken
from coordinator.text import Tokenizer
from pdserve.protocol import TokenLogprobs

_LEAST = -9999.0  # lower bound, as JSON has no infinity


class TokenNames:
    """How tokens are named: by their text, which may be ambiguous, or by their ids."""

    def __init__(self, tokenizer: Tokenizer, *, are_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._are_ids = are_ids
        self._of_chat: dict[int, tuple[str, list[int]]] = {}  # found so far, by token id
        self._texts: dict[int, str] = {}

    def of_chat(self, token_id: int) -> tuple[str, list[int]]:
        """Return a token's name and its bytes."""
        found = self._of_chat.get(token_id)
        if found is None:
            piece = self._tokenizer.pieces.shown(token_id)
            name = self._id(token_id) if self._are_ids else piece.decode("utf-8", errors="replace")
            found = self._of_chat[token_id] = name, list(piece)
        return found

    def of_completion(self, token_id: int) -> str:
        """Return a token's name."""
        return self._id(token_id) if self._are_ids else self.text(token_id)

    def text(self, token_id: int) -> str:
        """Return a token's text; incomplete UTF-8 is escaped, as there is no field for bytes."""
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = self._text(token_id)
        return found

    def _text(self, token_id: int) -> str:
        piece = self._tokenizer.pieces.shown(token_id)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    @staticmethod
    def _id(token_id: int) -> str:
        """Return the name for a token id, in vLLM's form."""
        return f"token_id:{token_id}"


def chat_logprobs(tokens: Sequence[ScoredToken], names: TokenNames) -> list[TokenLogprob]:
    """Return a chat choice's log-probabilities: each token's name, bytes and top alternatives."""
    content: list[TokenLogprob] = []
    for token in tokens:
        assert token.logprobs is not None, "prompts of chats are not scored"
        top = [
            TopLogprob(*_chat_token(token_id, logprob, names))
            for token_id, logprob in _top(token.logprobs)
        ]
        chosen = _chat_token(token.token_id, token.logprobs.chosen, names)
        content.append(TokenLogprob(*chosen, top_logprobs=top))
    return content


def completion_logprobs(
    tokens: Sequence[ScoredToken], names: TokenNames, num_top: int
) -> CompletionLogprobs:
    """Return a completion's log-probabilities; the top tokens always include the chosen one.

    Of several tokens with one name, the chosen one is listed, or else the likeliest.
    """
    shown = CompletionLogprobs([], [], [], [])
    for token in tokens:
        name, logprobs = names.of_completion(token.token_id), token.logprobs
        shown.tokens.append(name)
        shown.text_offset.append(token.offset)
        if logprobs is None:
            shown.token_logprobs.append(None)
            shown.top_logprobs.append(None)
            continue
        top = {name: _finite(logprobs.chosen)}
        for top_id, logprob in _top(logprobs)[:num_top]:
            top.setdefault(names.of_completion(top_id), _finite(logprob))
        shown.token_logprobs.append(_finite(logprobs.chosen))
        shown.top_logprobs.append(top)
    return shown


def prompt_logprobs(
    token_ids: Sequence[int], found: Sequence[TokenLogprobs], names: TokenNames, num_top: int
) -> list[msgspec.Raw]:
    """Return the log-probabilities of some of a prompt's tokens in vLLM's form, encoded.

    Per prompt token: token id |-> log-probability and rank in that place.
    """
    shown: list[msgspec.Raw] = []
    for token_id, logprobs in zip(token_ids, found, strict=True):
        ranked = {token_id: (logprobs.chosen, logprobs.rank)}
        for index, (top_id, logprob) in enumerate(_top(logprobs)[:num_top]):
            ranked.setdefault(top_id, (logprob, index + 1))
        entry = {
            str(i): PromptLogprob(_finite(logprob), rank, names.text(i))
            for i, (logprob, rank) in ranked.items()
        }
        shown.append(encoded(entry))
    return shown


def encoded(value: object) -> msgspec.Raw:
    """Return a part of a long answer as JSON, so that encoding the answer only copies it."""
    return msgspec.Raw(msgspec.json.encode(value))


def _top(logprobs: TokenLogprobs) -> list[tuple[int, float]]:
    return list(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))


def _chat_token(token_id: int, logprob: float, names: TokenNames) -> tuple[str, float, list[int]]:
    name, piece = names.of_chat(token_id)
    return name, _finite(logprob), piece


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
