"""The format of a message, whole and as events."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import structs

from coordinator.api.answer import bodies
from coordinator.api.answer.choice import ChoiceDelta
from coordinator.api.answer.pieces import AnswerPieces
from coordinator.api.messages.errors import failed_call, status_of
from coordinator.api.messages.events import (
    PING,
    EndDelta,
    MessageDelta,
    MessageStart,
    MessageStop,
    encoded,
)
from coordinator.api.messages.objects import (
    MadeMessage,
    MessageUsage,
    StopReason,
    ThinkingTokens,
    message_usage,
)
from coordinator.api.messages.output import OutputBlocks
from coordinator.api.plan.generations import PartsPlan

_ENDED = encoded(MessageStop())


class MessagesFormat:
    """Format of POST /v1/messages. See AnswerFormat.

    Args:
        message: the message before anything has come.
        request_id: of the call, for its error.
        shows_thinking: otherwise the client gets the signature of thinking alone.
        is_limited: fewer tokens are left in the context than the call asks for.
    """

    def __init__(
        self,
        message: MadeMessage,
        plan: PartsPlan,
        request_id: str,
        *,
        shows_thinking: bool,
        is_limited: bool,
    ) -> None:
        self._message = message
        self._request_id = request_id
        self._is_limited = is_limited
        self._pieces = AnswerPieces(plan.make())
        self._output = OutputBlocks(plan.make_id, shows_thinking=shows_thinking)

    def opening(self, index: int, usage: bodies.Usage | None) -> Sequence[bytes]:
        """Return the events of a message that begins, with its prompt's token counts."""
        assert usage is not None, "every event is given the counts so far"
        self._message.usage = self._usage(usage)
        return [encoded(MessageStart(message=self._message)), PING]

    def chunk(self, delta: ChoiceDelta, usage: bodies.Usage | None) -> Sequence[bytes]:
        """Return events for blocks that begin, grow or end."""
        told: list[bytes] = []
        for piece in self._pieces.take_in(delta):
            told += self._output.add(piece.parts)
        if delta.finish_reason is None:
            return told
        self._message.stop_reason = self._stop_reason(delta)
        if self._message.stop_reason == "stop_sequence":
            self._message.stop_sequence = str(delta.stop_reason)
        return told + self._output.close(is_cut=self._pieces.is_in_call)

    def text_template(self, index: int) -> None:
        """As AnswerFormat: what is around a text depends on what was before it."""

    def closing(self, usage: bodies.Usage) -> Sequence[bytes]:
        """Return the last events: why the message ended, and that it has."""
        message = self._end(usage)
        assert message.stop_reason is not None, "its last delta was taken in"
        end = EndDelta(stop_reason=message.stop_reason, stop_sequence=message.stop_sequence)
        return [encoded(MessageDelta(delta=end, usage=message.usage)), _ENDED]

    def failure(self, error: bodies.ErrorDetail) -> bytes:
        """Return the error as an event."""
        status = status_of(500, error.code)
        return encoded(failed_call(error, self._request_id, status))

    def take_in(self, delta: ChoiceDelta) -> None:
        """Add new content to the whole message."""
        self.chunk(delta, None)

    def whole(self, usage: bodies.Usage) -> bytes:
        """Return the whole message as JSON."""
        return msgspec.json.encode(self._end(usage))

    # ---- parts ---------------------------------------------------------------------------------

    def _usage(self, usage: bodies.Usage) -> MessageUsage:
        return message_usage(usage, self._message.usage.service_tier)

    def _end(self, usage: bodies.Usage) -> MadeMessage:
        counts = self._usage(usage)
        num_thinking = ThinkingTokens(self._pieces.num_reasoning_tokens)
        counts = structs.replace(counts, output_tokens_details=num_thinking)
        self._message.content, self._message.usage = self._output.blocks, counts
        return self._message

    def _stop_reason(self, delta: ChoiceDelta) -> StopReason:
        if delta.finish_reason == "length":
            return "model_context_window_exceeded" if self._is_limited else "max_tokens"
        if isinstance(delta.stop_reason, str):
            return "stop_sequence"
        is_called = self._pieces.num_calls > 0 and not self._pieces.is_in_call
        return "tool_use" if is_called else "end_turn"
