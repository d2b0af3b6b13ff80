"""Log-probabilities in the forms that the two endpoints show them."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.api.choice import ScoredToken
from coordinator.api.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
)
from coordinator.text import Tokenizer
from pdserve.protocol import TokenLogprobs

_LEAST = -9999.0  # JSON has no infinity


def chat_logprobs(tokens: Sequence[ScoredToken], tokenizer: Tokenizer) -> ChatLogprobs:
    """Of a chat choice: per token its text, its bytes and the likeliest tokens in its place."""
    content: list[TokenLogprob] = []
    for token in tokens:
        assert token.logprobs is not None, "prompts of chats are not scored"
        top = [
            TopLogprob(*_chat_token(token_id, logprob, tokenizer))
            for token_id, logprob in _top(token.logprobs)
        ]
        chosen = _chat_token(token.token_id, token.logprobs.chosen, tokenizer)
        content.append(TokenLogprob(*chosen, top_logprobs=top))
    return ChatLogprobs(content)


def completion_logprobs(
    tokens: Sequence[ScoredToken], tokenizer: Tokenizer, num_top: int
) -> CompletionLogprobs:
    """Of a completion: the chosen token is always among the likeliest ones shown."""
    shown = CompletionLogprobs([], [], [], [])
    for token in tokens:
        name, logprobs = _completion_token(token.token_id, tokenizer), token.logprobs
        shown.tokens.append(name)
        shown.text_offset.append(token.offset)
        if logprobs is None:
            shown.token_logprobs.append(None)
            shown.top_logprobs.append(None)
            continue
        top = {_completion_token(i, tokenizer): _finite(p) for i, p in _top(logprobs)[:num_top]}
        shown.token_logprobs.append(_finite(logprobs.chosen))
        shown.top_logprobs.append({name: _finite(logprobs.chosen)} | top)
    return shown


def prompt_logprobs(
    token_ids: Sequence[int], found: Sequence[TokenLogprobs], tokenizer: Tokenizer, num_top: int
) -> list[dict[str, PromptLogprob] | None]:
    """Of a prompt, as vLLM shows them: token id |-> how likely it was in each token's place."""
    shown: list[dict[str, PromptLogprob] | None] = [None]
    for token_id, logprobs in zip(token_ids[1:], found, strict=True):
        ranked = {token_id: (logprobs.chosen, logprobs.rank)}
        for index, (top_id, logprob) in enumerate(_top(logprobs)[:num_top]):
            ranked.setdefault(top_id, (logprob, index + 1))
        shown.append(
            {
                str(i): PromptLogprob(_finite(logprob), rank, _completion_token(i, tokenizer))
                for i, (logprob, rank) in ranked.items()
            }
        )
    return shown


def _top(logprobs: TokenLogprobs) -> list[tuple[int, float]]:
    return list(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))


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
