"""Parses a whole answer: reasoning first, then text and tool calls."""

from __future__ import annotations

from coordinator.text.parts.interface import Parts, PartsParser
from coordinator.text.parts.reasoning import Reasoning


class AnswerParts:
    """A PartsParser that chains up to two others: the first one's content goes to the second.

    Args:
        reasoning: separates reasoning from the rest; None: there is no reasoning.
        tools: finds calls in the rest; None: there are no calls.
        max_calls: further calls are dropped; None: unlimited.
        must_call: the rest consists of calls only; other text is a truncated call and is dropped.
    """

    def __init__(
        self,
        reasoning: Reasoning | None = None,
        tools: PartsParser | None = None,
        max_calls: int | None = None,
        must_call: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._must_call = must_call
        self.num_calls = 0

    @property
    def is_reasoning(self) -> bool:
        """Whether the text ends inside reasoning."""
        return self._reasoning is not None and self._reasoning.is_inside

    @property
    def may_reason(self) -> bool:
        """Whether the text may go on with reasoning."""
        return self._reasoning is not None and not self._reasoning.is_over

    def push(self, text: str) -> Parts:
        """See PartsParser.push."""
        if self._reasoning is None:
            return self._through_tools(Parts(content=text))
        return self._through_tools(self._reasoning.push(text))

    def finish(self) -> Parts:
        """See PartsParser.finish."""
        last = Parts() if self._reasoning is None else self._reasoning.finish()
        parts = self._through_tools(last)
        return parts if self._tools is None else parts + self._kept(self._tools.finish())

    def _through_tools(self, parts: Parts) -> Parts:
        if self._tools is None or not parts.content:
            return parts
        return Parts(reasoning=parts.reasoning) + self._kept(self._tools.push(parts.content))

    def _kept(self, parts: Parts) -> Parts:
        if self._max_calls is not None:
            parts.calls = [piece for piece in parts.calls if piece.index < self._max_calls]
        if self._must_call:
            parts.content = ""
        for piece in parts.calls:
            self.num_calls = max(self.num_calls, piece.index + 1)
        return parts
