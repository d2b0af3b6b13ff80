"""Log-probabilities in the forms that the two endpoints show them."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.api.choice import ScoredToken
from coordinator.api.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from coordinator.text import Tokenizer

_LEAST = -9999.0  # JSON has no infinity


def chat_logprobs(tokens: Sequence[ScoredToken], tokenizer: Tokenizer) -> ChatLogprobs:
    """Of a chat choice: per token its text, its bytes and the likeliest tokens in its place."""
    content: list[TokenLogprob] = []
    for token in tokens:
        top = [
            TopLogprob(*_chat_token(token_id, logprob, tokenizer))
            for token_id, logprob in _top(token)
        ]
        chosen = _chat_token(token.token_id, token.logprobs.chosen, tokenizer)
        content.append(TokenLogprob(*chosen, top_logprobs=top))
    return ChatLogprobs(content)


def completion_logprobs(tokens: Sequence[ScoredToken], tokenizer: Tokenizer) -> CompletionLogprobs:
    """Of a completion: the chosen token is always among the likeliest ones shown."""
    shown = CompletionLogprobs([], [], [], [])
    for token in tokens:
        name = _completion_token(token.token_id, tokenizer)
        top = {_completion_token(i, tokenizer): _finite(logprob) for i, logprob in _top(token)}
        shown.tokens.append(name)
        shown.token_logprobs.append(_finite(token.logprobs.chosen))
        shown.top_logprobs.append({name: _finite(token.logprobs.chosen)} | top)
        shown.text_offset.append(token.offset)
    return shown


def _top(token: ScoredToken) -> list[tuple[int, float]]:
    return list(zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True))


def _chat_token(
    token_id: int, logprob: float, tokenizer: Tokenizer
) -> tuple[str, float, list[int]]:
    piece = tokenizer.shown_bytes(token_id)
    return piece.decode("utf-8", errors="replace"), _finite(logprob), list(piece)


def _completion_token(token_id: int, tokenizer: Tokenizer) -> str:
    """Its text; as there is no field for bytes, a part of a character is spelt out."""
    piece = tokenizer.shown_bytes(token_id)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
