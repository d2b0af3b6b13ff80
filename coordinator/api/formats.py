"""The two shapes of an answer: chat completion and text completion, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from coordinator.api import responses
from coordinator.api.choice import ChoiceDelta
from coordinator.api.logprobs import chat_logprobs, completion_logprobs
from coordinator.text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every chunk of an answer repeats."""

    id: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str


class AnswerFormat(Protocol):
    """How an endpoint puts things; everything comes as JSON."""

    def opening(self, index: int) -> bytes | None:
        """A choice's first chunk, before any text, if the endpoint has one."""
        ...

    def chunk(self, delta: ChoiceDelta) -> bytes:
        """A chunk with what is new in a choice."""
        ...

    def usage_chunk(self, usage: responses.Usage) -> bytes:
        """The last chunk, for a client that asked for it."""
        ...

    def whole(self, deltas: Sequence[ChoiceDelta], usage: responses.Usage) -> bytes:
        """The answer to a client that does not stream; one delta per choice."""
        ...


class ChatFormat:
    """POST /v1/chat/completions."""

    def __init__(
        self, head: AnswerHead, tokenizer: Tokenizer, *, shows_logprobs: bool, shows_usage: bool
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._shows_logprobs = shows_logprobs
        self._null_usage: UnsetType | None = None if shows_usage else UNSET

    def opening(self, index: int) -> bytes:
        """The role, and text that is still empty."""
        delta = responses.ChatDelta(role="assistant", content="")
        return self._chunk([responses.ChatChunkChoice(index, delta)])

    def chunk(self, delta: ChoiceDelta) -> bytes:
        """Text, or nothing but the end."""
        shown = responses.ChatDelta(content=delta.text) if delta.text else responses.ChatDelta()
        choice = responses.ChatChunkChoice(
            delta.index, shown, self._logprobs(delta), delta.finish_reason
        )
        return self._chunk([choice])

    def usage_chunk(self, usage: responses.Usage) -> bytes:
        """No choices."""
        return self._chunk([], usage)

    def whole(self, deltas: Sequence[ChoiceDelta], usage: responses.Usage) -> bytes:
        """One message per choice."""
        choices = [
            responses.ChatChoice(
                delta.index,
                responses.AssistantMessage(delta.text),
                self._logprobs(delta),
                delta.finish_reason or "",
            )
            for delta in deltas
        ]
        head = self._head
        return msgspec.json.encode(
            responses.ChatCompletion(
                id=head.id,
                created=head.created,
                model=head.model,
                system_fingerprint=head.system_fingerprint,
                choices=choices,
                usage=usage,
            )
        )

    def _logprobs(self, delta: ChoiceDelta) -> responses.ChatLogprobs | None:
        return chat_logprobs(delta.tokens, self._tokenizer) if self._shows_logprobs else None

    def _chunk(
        self, choices: list[responses.ChatChunkChoice], usage: responses.Usage | None = None
    ) -> bytes:
        head = self._head
        return msgspec.json.encode(
            responses.ChatChunk(
                id=head.id,
                created=head.created,
                model=head.model,
                system_fingerprint=head.system_fingerprint,
                choices=choices,
                usage=usage or self._null_usage,
            )
        )


class CompletionFormat:
    """POST /v1/completions: whole and chunk are one shape."""

    def __init__(
        self, head: AnswerHead, tokenizer: Tokenizer, *, shows_logprobs: bool, shows_usage: bool
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._shows_logprobs = shows_logprobs
        self._null_usage: UnsetType | None = None if shows_usage else UNSET

    def opening(self, index: int) -> None:
        """Text needs no opening."""

    def chunk(self, delta: ChoiceDelta) -> bytes:
        """New text, or the end."""
        return self._encode([self._choice(delta)], self._null_usage)

    def usage_chunk(self, usage: responses.Usage) -> bytes:
        """No choices."""
        return self._encode([], usage)

    def whole(self, deltas: Sequence[ChoiceDelta], usage: responses.Usage) -> bytes:
        """One choice per prompt."""
        return self._encode([self._choice(delta) for delta in deltas], usage)

    def _choice(self, delta: ChoiceDelta) -> responses.CompletionChoice:
        shown = completion_logprobs(delta.tokens, self._tokenizer) if self._shows_logprobs else None
        return responses.CompletionChoice(delta.index, delta.text, shown, delta.finish_reason)

    def _encode(
        self,
        choices: list[responses.CompletionChoice],
        usage: responses.Usage | UnsetType | None,
    ) -> bytes:
        head = self._head
        return msgspec.json.encode(
            responses.Completion(
                id=head.id,
                created=head.created,
                model=head.model,
                system_fingerprint=head.system_fingerprint,
                choices=choices,
                usage=usage,
            )
        )
