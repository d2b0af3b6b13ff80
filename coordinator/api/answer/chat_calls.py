"""Encodes calls in a chat answer: tool calls, or one deprecated `function_call`."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from coordinator.api.answer import bodies
from coordinator.api.plan.parts import PartsPlan
from coordinator.text.parts import CallPiece


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
