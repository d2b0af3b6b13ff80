"""The format of a chat completion, whole and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
from msgspec import UNSET, UnsetType

from coordinator.api.answer import bodies
from coordinator.api.answer.choice import ChoiceDelta, TokenParts
from coordinator.api.answer.formats import AnswerHead, PromptsShown, UsageShown, error_event
from coordinator.api.answer.logprobs import TokenNames, chat_logprobs, encoded
from coordinator.api.answer.sse import DONE, TextTemplate, framed
from coordinator.api.plan.generations import PartsPlan
from coordinator.text.parts import CallPiece, Parts


class CallsShown:
    """Adds an answer's calls to a whole message or to stream deltas."""

    def __init__(self, plan: PartsPlan) -> None:
        self._make_id = plan.make_id
        self._is_function = plan.shows_function_call

    @property
    def finish_reason(self) -> str:
        """The finish reason of an answer that has calls."""
        return "function_call" if self._is_function else "tool_calls"

    def add_to_message(
        self, choice: int, message: bodies.AssistantMessage, pieces: Sequence[CallPiece]
    ) -> None:
        """Add all calls of an answer to its message."""
        calls: list[bodies.MadeCall] = []
        for piece in pieces:
            if piece.name is not None:
                calls.append(self._call(choice, piece))
            else:
                calls[-1].function.arguments += piece.arguments
        if not calls:
            return
        if self._is_function:
            message.function_call = calls[0].function
        else:
            message.tool_calls = calls

    def add_to_delta(
        self, choice: int, delta: bodies.ChatDelta, pieces: Sequence[CallPiece]
    ) -> None:
        """Add new pieces of calls to a stream delta."""
        if not pieces:
            return
        if self._is_function:
            name = pieces[0].name
            delta.function_call = bodies.FunctionCall(
                name=UNSET if name is None else name,
                arguments="".join(piece.arguments for piece in pieces),
            )
        else:
            delta.tool_calls = [self._piece(choice, piece) for piece in pieces]

    def _piece(self, choice: int, piece: CallPiece) -> bodies.MadeCall:
        if piece.name is None:
            function = bodies.FunctionCall(arguments=piece.arguments)
            return bodies.MadeCall(index=piece.index, function=function)
        call = self._call(choice, piece)
        call.index = piece.index
        return call

    def _call(self, choice: int, piece: CallPiece) -> bodies.MadeCall:
        function = bodies.FunctionCall(name=piece.name or "", arguments=piece.arguments)
        call_id = self._make_id(choice, piece)
        return bodies.MadeCall(id=call_id, type="function", function=function)


@dataclass(slots=True)
class _Told:
    """The state of one choice whose text is being split into parts."""

    parts: TokenParts
    text_chunk: TextTemplate  # template of chunks that only have text
    unshown: list[msgspec.Raw] = field(default_factory=list)  # log-probabilities not sent yet
    untold_ids: list[int] = field(default_factory=list)
    taken: Parts = field(default_factory=Parts)  # into a whole answer
    last: ChoiceDelta | None = None  # of these

    def take_in(self, delta: ChoiceDelta) -> Parts:
        """Process a delta's text and ids, and return the parts that are certain now."""
        self.untold_ids += delta.token_ids
        parts = self.parts.push_whole(delta)
        return parts + self.parts.finish(delta) if delta.finish_reason is not None else parts

    def finish_reason(self, delta: ChoiceDelta, called: str) -> str | None:
        """Return the finish reason; `called` replaces "stop" if the answer has calls."""
        is_called = self.parts.num_calls > 0 and not self.parts.is_in_call
        is_called = is_called and delta.finish_reason == "stop"
        return called if is_called else delta.finish_reason


class ChatFormat:
    """Format of POST /v1/chat/completions. See AnswerFormat."""

    def __init__(
        self,
        head: AnswerHead,
        names: TokenNames,
        plan: PartsPlan,
        prompts: PromptsShown,
        *,
        shows_logprobs: bool,
        usage_shown: UsageShown,
        echoed: str = "",
    ) -> None:
        """`echoed`: text of the conversation that every answer begins with."""
        self._head = head
        self._names = names
        self._plan = plan
        self._prompts = prompts
        self._echoed = echoed
        self._calls = CallsShown(plan)
        self._shows_logprobs = shows_logprobs
        self._is_text_all = not (shows_logprobs or prompts.tells_ids)  # chunks have only text
        self._shows_usage = usage_shown is not UsageShown.NOWHERE
        self._null_usage: UnsetType | None = None if self._shows_usage else UNSET
        # Where reasoning may come, clients read this field of everything.
        self._no_reasoning: UnsetType | None = None if plan.shows_reasoning else UNSET
        self._told: dict[int, _Told] = {}  # choice index |-> state
        self._prompt_logprobs: list[msgspec.Raw] | UnsetType = UNSET

    def opening(self, index: int, usage: bodies.Usage | None) -> Sequence[bytes]:
        """Return a chunk with the role, and with the echoed content or none."""
        choice = bodies.ChatChunkChoice(index, self._delta(self._echoed, role="assistant"))
        return [self._chunk([choice], usage, prompt_ids=self._prompts.ids(index))]

    def chunk(self, delta: ChoiceDelta, usage: bodies.Usage | None) -> Sequence[bytes]:
        """Return a chunk with new text, reasoning, calls or the end; none if all is held back."""
        told = self._told_of(delta.index)
        parts = self._take_in(told, delta)
        finish_reason = told.finish_reason(delta, self._calls.finish_reason)
        if finish_reason is None:
            if not parts:
                return []
            if usage is None and parts.is_content_only and self._is_text_all:
                return [told.text_chunk.filled(parts.content)]
        shown = self._delta(parts.content or UNSET, parts.reasoning)
        self._calls.add_to_delta(delta.index, shown, parts.calls)
        logprobs = self._logprobs(told) if told.unshown else None
        choice = bodies.ChatChunkChoice(delta.index, shown, logprobs, finish_reason)
        choice.token_ids = self._ids(told)
        if finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        return [self._chunk([choice], usage)]

    def text_template(self, index: int) -> TextTemplate | None:
        """As AnswerFormat."""
        told = self._told_of(index)
        return told.text_chunk if self._is_text_all and told.parts.is_content else None

    def closing(self, usage: bodies.Usage) -> Sequence[bytes]:
        """Return the end mark, after a chunk with the token counts if the client asked for them."""
        return [self._chunk([], usage), DONE] if self._shows_usage else [DONE]

    def failure(self, error: bodies.ErrorDetail) -> bytes:
        """Return the error object as an event."""
        return error_event(error)

    def take_in(self, delta: ChoiceDelta) -> None:
        """Add a choice's new content to the whole answer."""
        told = self._told_of(delta.index)
        told.taken += self._take_in(told, delta)
        told.last = delta
        if delta.index == 0:  # there is one prompt
            shown = self._prompt_logprobs
            self._prompt_logprobs = self._prompts.add_logprobs(shown, delta, self._names)

    def whole(self, usage: bodies.Usage) -> bytes:
        """Return the answer with one message per choice."""
        head = self._head
        answer = bodies.ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=[self._choice(told) for told in self._told.values()],
            usage=self._usage(usage),
            service_tier=head.service_tier,
            prompt_logprobs=self._prompt_logprobs,
            prompt_token_ids=self._prompts.ids(0),
        )
        return msgspec.json.encode(answer)

    def _usage(self, usage: bodies.Usage) -> bodies.Usage:
        """Return token counts with those of the reasoning."""
        num = sum(told.parts.num_reasoning_tokens for told in self._told.values())
        known = usage.completion_tokens_details or bodies.CompletionTokensDetails()
        details = msgspec.structs.replace(known, reasoning_tokens=num)
        return msgspec.structs.replace(usage, completion_tokens_details=details)

    # ---- parts ---------------------------------------------------------------------------------

    def _told_of(self, index: int) -> _Told:
        told = self._told.get(index)
        if told is None:
            template = TextTemplate(partial(self._text_chunk, index))
            told = self._told[index] = _Told(TokenParts(self._plan.make()), template)
        return told

    def _text_chunk(self, index: int, text: str) -> bytes:
        return self._chunk([bodies.ChatChunkChoice(index, self._delta(text))])

    def _delta(
        self, content: str | UnsetType, reasoning: str = "", role: str | UnsetType = UNSET
    ) -> bodies.ChatDelta:
        return bodies.ChatDelta(
            role=role, content=content, reasoning_content=reasoning or self._no_reasoning
        )

    def _take_in(self, told: _Told, delta: ChoiceDelta) -> Parts:
        if self._shows_logprobs:
            told.unshown += map(encoded, chat_logprobs(delta.tokens, self._names))
        return told.take_in(delta)

    def _choice(self, told: _Told) -> bodies.ChatChoice:
        parts, delta = told.taken, told.last
        assert delta is not None, "a delta was taken in"
        content = self._echoed + parts.content
        message = bodies.AssistantMessage(
            content=content if content or not parts.calls else None,
            reasoning_content=parts.reasoning or self._no_reasoning,
        )
        self._calls.add_to_message(delta.index, message, parts.calls)
        finish_reason = told.finish_reason(delta, self._calls.finish_reason) or ""
        return bodies.ChatChoice(
            delta.index,
            message,
            self._logprobs(told),
            finish_reason,
            delta.stop_reason,
            self._ids(told),
        )

    def _logprobs(self, told: _Told) -> bodies.ChatLogprobs | None:
        shown, told.unshown = told.unshown, []
        return bodies.ChatLogprobs(shown) if self._shows_logprobs else None

    def _ids(self, told: _Told) -> list[int] | UnsetType:
        token_ids, told.untold_ids = told.untold_ids, []
        return self._prompts.answer_ids(token_ids)

    def _chunk(
        self,
        choices: list[bodies.ChatChunkChoice],
        usage: bodies.Usage | None = None,
        prompt_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        head = self._head
        chunk = bodies.ChatChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=choices,
            usage=self._null_usage if usage is None else self._usage(usage),
            service_tier=head.service_tier,
            prompt_token_ids=prompt_ids,
        )
        return framed(msgspec.json.encode(chunk))
