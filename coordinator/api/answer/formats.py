"""Answer formats, whole and streamed: the common interface, and the text completion's format."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from coordinator.api.answer import bodies
from coordinator.api.answer.choice import ChoiceDelta
from coordinator.api.answer.logprobs import TokenNames, completion_logprobs, prompt_logprobs
from coordinator.api.answer.sse import DONE, TextTemplate, framed
from coordinator.api.answer.whole_choice import WholeChoice
from coordinator.api.read.fields import GenerationFields
from coordinator.models.model import Fingerprint, Model
from pdserve.shared.errors import InvalidRequest


@dataclass(slots=True)
class AnswerHead:
    """Fields that every chunk of an answer repeats."""

    id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: Fingerprint
    service_tier: str | UnsetType = UNSET  # of a chat that asked for one
    revision: str = ""  # of the nodes that serve it; empty: not known yet

    @property
    def system_fingerprint(self) -> str:
        """What computes it."""
        return self.fingerprint.of(self.revision)

    @classmethod
    def now(
        cls, answer_id: str, name: str, model: Model, service_tier: str | UnsetType = UNSET
    ) -> AnswerHead:
        """Return that of an answer which is created now, by `model` under this name."""
        return cls(answer_id, int(time.time()), name, model.fingerprint, service_tier)


class UsageShown(Enum):
    """Which chunks of a stream carry token counts."""

    NOWHERE = auto()
    LAST = auto()  # one extra chunk at the end
    EVERYWHERE = auto()  # the extra chunk, and in every other chunk the counts so far


def usage_shown(body: GenerationFields) -> UsageShown:
    """Return which chunks of the stream carry token counts. Raises InvalidRequest."""
    options = body.stream_options
    if options is None:
        return UsageShown.NOWHERE
    if not body.stream:
        raise InvalidRequest("'stream_options' needs 'stream' to be true", "stream_options")
    if not options.include_usage:
        return UsageShown.NOWHERE
    return UsageShown.EVERYWHERE if options.continuous_usage_stats else UsageShown.LAST


class EndsFailed(Protocol):
    """How an endpoint ends a stream that has failed."""

    def failure(self, error: bodies.ErrorDetail) -> bytes:
        """Return the last event of a stream that failed."""
        ...


class AnswerFormat(EndsFailed, Protocol):
    """How an endpoint encodes its answers: a whole answer as JSON, a stream as framed events."""

    def opening(self, index: int, usage: bodies.Usage | None) -> Sequence[bytes]:
        """Return a choice's first events, before any text.

        `usage`: the prompt's token counts, if every chunk carries usage.
        """
        ...

    def chunk(self, delta: ChoiceDelta, usage: bodies.Usage | None) -> Sequence[bytes]:
        """Return events with a choice's new content; none when nothing can be shown yet.

        `usage`: the token counts so far, if every chunk carries usage.
        """
        ...

    def text_template(self, index: int) -> TextTemplate | None:
        """Return the event of text alone that a choice goes on with; None: it varies.

        `usage` is not carried.
        """
        ...

    def closing(self, usage: bodies.Usage) -> Sequence[bytes]:
        """Return the last events, after all choices have finished."""
        ...

    def take_in(self, delta: ChoiceDelta) -> None:
        """Add a choice's new content to the whole answer, for a client that does not stream."""
        ...

    def whole(self, usage: bodies.Usage) -> bytes:
        """Return the whole answer, once all content was taken in."""
        ...


_NULL = msgspec.Raw(b"null")


def error_event(error: bodies.ErrorDetail) -> bytes:
    """Return an error event followed by [DONE], as some clients read until they see [DONE]."""
    return framed(msgspec.json.encode(bodies.ErrorBody(error))) + DONE


class PromptsShown(msgspec.Struct, frozen=True, kw_only=True):
    """A call's prompts, and which data about them is returned with the answers."""

    token_ids: Sequence[Sequence[int]]  # of each prompt
    num_choices: int  # choices shown per prompt
    num_top: int | None  # likeliest tokens returned per prompt token; None: prompts are not scored
    tells_ids: bool  # whether token ids of prompts and answers are returned

    def add_logprobs(
        self, shown: list[msgspec.Raw] | UnsetType, delta: ChoiceDelta, names: TokenNames
    ) -> list[msgspec.Raw] | UnsetType:
        """Return `shown` with more of the log-probabilities of the choice's prompt."""
        if self.num_top is None:
            return UNSET
        if isinstance(shown, UnsetType):
            shown = [_NULL]  # the first token has no predecessor
        begin, found = len(shown), delta.prompt_logprobs
        token_ids = self._of_choice(delta.index)[begin : begin + len(found)]
        shown += prompt_logprobs(token_ids, found, names, self.num_top)
        return shown

    def ids(self, choice: int) -> list[int] | UnsetType:
        """Return the token ids of the prompt to which this choice belongs."""
        return list(self._of_choice(choice)) if self.tells_ids else UNSET

    def answer_ids(self, token_ids: Sequence[int]) -> list[int] | UnsetType:
        """Return the ids of a choice's new tokens."""
        return list(token_ids) if self.tells_ids else UNSET

    def _of_choice(self, index: int) -> Sequence[int]:
        return self.token_ids[index // self.num_choices]


class CompletionFormat:
    """Format of POST /v1/completions; a chunk has the same fields as a whole answer."""

    def __init__(
        self,
        head: AnswerHead,
        names: TokenNames,
        prompts: PromptsShown,
        *,
        num_logprobs: int | None,
        usage_shown: UsageShown,
    ) -> None:
        self._head = head
        self._names = names
        self._prompts = prompts
        self._num_logprobs = num_logprobs
        self._shows_usage = usage_shown is not UsageShown.NOWHERE
        self._null_usage: UnsetType | None = None if self._shows_usage else UNSET
        self._is_text_all = num_logprobs is None and not prompts.tells_ids  # chunks have only text
        self._text_chunks: dict[int, TextTemplate] = {}  # choice index |-> template
        self._begun: set[int] = set()  # indices of choices that have been encoded before
        self._whole: dict[int, WholeChoice] = {}  # by choice index

    def opening(self, index: int, usage: bodies.Usage | None) -> Sequence[bytes]:
        """Return no events: a text completion has no opening."""
        return []

    def chunk(self, delta: ChoiceDelta, usage: bodies.Usage | None) -> Sequence[bytes]:
        """Return one event with new text, or with the choice's end."""
        if usage is None and delta.finish_reason is None and self._is_text_all:
            return [self._text_chunk(delta.index).filled(delta.text)]
        return [self._framed_choice(self._choice(delta), usage)]

    def text_template(self, index: int) -> TextTemplate | None:
        """As AnswerFormat."""
        return self._text_chunk(index) if self._is_text_all else None

    def closing(self, usage: bodies.Usage) -> Sequence[bytes]:
        """Return the end mark, after a chunk with the token counts if the client asked for them."""
        return [framed(self._encode([], usage)), DONE] if self._shows_usage else [DONE]

    def failure(self, error: bodies.ErrorDetail) -> bytes:
        """Return the error object as an event."""
        return error_event(error)

    def take_in(self, delta: ChoiceDelta) -> None:
        """Add a choice's new content to the whole answer."""
        whole = self._whole.setdefault(delta.index, WholeChoice())
        whole.add(self._choice(delta))
        shown = whole.prompt_logprobs
        whole.prompt_logprobs = self._prompts.add_logprobs(shown, delta, self._names)

    def whole(self, usage: bodies.Usage) -> bytes:
        """Return the answer with all choices."""
        return self._encode([whole.complete() for whole in self._whole.values()], usage)

    def _text_chunk(self, index: int) -> TextTemplate:
        """Return the template for chunks that only have text; scored prompts are not streamed."""
        found = self._text_chunks.get(index)
        if found is None:
            found = self._text_chunks[index] = TextTemplate(
                lambda text: self._framed_choice(
                    bodies.CompletionChoice(index, text, None, None), None
                )
            )
        return found

    def _framed_choice(self, choice: bodies.CompletionChoice, usage: bodies.Usage | None) -> bytes:
        return framed(self._encode([choice], usage or self._null_usage))

    def _choice(self, delta: ChoiceDelta) -> bodies.CompletionChoice:
        shown = None
        if self._num_logprobs is not None:
            shown = completion_logprobs(delta.tokens, self._names, self._num_logprobs)
        choice = bodies.CompletionChoice(delta.index, delta.text, shown, delta.finish_reason)
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        choice.token_ids = self._prompts.answer_ids(delta.token_ids)
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            choice.prompt_token_ids = self._prompts.ids(delta.index)
        return choice

    def _encode(
        self,
        choices: list[bodies.CompletionChoice],
        usage: bodies.Usage | UnsetType | None,
    ) -> bytes:
        head = self._head
        return msgspec.json.encode(
            bodies.Completion(
                id=head.id,
                created=head.created,
                model=head.model,
                system_fingerprint=head.system_fingerprint,
                choices=choices,
                usage=usage,
            )
        )
