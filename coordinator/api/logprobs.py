"""Converts log-probabilities to the formats of chat and text completions."""

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

_LEAST = -9999.0  # lower bound, as JSON has no infinity


class TokenNames:
    """How tokens are named: by their text, which may be ambiguous, or by their ids."""

    def __init__(self, tokenizer: Tokenizer, *, are_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._are_ids = are_ids

    def of_chat(self, token_id: int) -> tuple[str, list[int]]:
        """Return a token's name and its bytes."""
        piece = self._tokenizer.shown_bytes(token_id)
        name = self._id(token_id) if self._are_ids else piece.decode("utf-8", errors="replace")
        return name, list(piece)

    def of_completion(self, token_id: int) -> str:
        """Return a token's name."""
        return self._id(token_id) if self._are_ids else self.text(token_id)

    def text(self, token_id: int) -> str:
        """Return a token's text; incomplete UTF-8 is escaped, as there is no field for bytes."""
        piece = self._tokenizer.shown_bytes(token_id)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    @staticmethod
    def _id(token_id: int) -> str:
        """Return the name for a token id, in vLLM's form."""
        return f"token_id:{token_id}"


def chat_logprobs(tokens: Sequence[ScoredToken], names: TokenNames) -> ChatLogprobs:
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
    return ChatLogprobs(content)


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
) -> list[dict[str, PromptLogprob] | None]:
    """Return a prompt's log-probabilities in vLLM's form.

    Per prompt token: token id |-> log-probability and rank in that place; None for the first.
    """
    shown: list[dict[str, PromptLogprob] | None] = [None]
    for token_id, logprobs in zip(token_ids[1:], found, strict=True):
        ranked = {token_id: (logprobs.chosen, logprobs.rank)}
        for index, (top_id, logprob) in enumerate(_top(logprobs)[:num_top]):
            ranked.setdefault(top_id, (logprob, index + 1))
        shown.append(
            {
                str(i): PromptLogprob(_finite(logprob), rank, names.text(i))
                for i, (logprob, rank) in ranked.items()
            }
        )
    return shown


def _top(logprobs: TokenLogprobs) -> list[tuple[int, float]]:
    return list(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))


def _chat_token(token_id: int, logprob: float, names: TokenNames) -> tuple[str, float, list[int]]:
    name, piece = names.of_chat(token_id)
    return name, _finite(logprob), piece


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
