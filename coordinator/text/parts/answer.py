"""Parses a whole answer: reasoning first, then text and tool calls."""

from __future__ import annotations

from coordinator.text.parts.harmony import Harmony
from coordinator.text.parts.interface import Parts, PartsParser
from coordinator.text.parts.reasoning import Reasoning


class AnswerParts:
    """A PartsParser that chains up to two others: the first one's content goes to the second.

    Args:
        reasoning: separates reasoning from the rest; None: there is no reasoning.
        tools: finds calls in the rest; None: there are no calls.
        max_calls: further calls are dropped; None: unlimited.
        must_call: the rest consists of calls only; other text is a truncated call and is dropped.
        channels: finds both, instead of the two.
    """

    def __init__(
        self,
        reasoning: Reasoning | None = None,
        tools: PartsParser | None = None,
        max_calls: int | None = None,
        must_call: bool = False,
        channels: Harmony | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._channels = channels
        self._tools: PartsParser | None = tools or channels
        self._max_calls = max_calls
        self._must_call = must_call
        self._num_found = 0  # calls, with those that are dropped
        self.num_calls = 0
        self.num_late_chars = 0  # at the end of the text: a call ended reasoning before them

    @property
    def is_reasoning(self) -> bool:
        """Whether the text ends inside reasoning."""
        if self._channels is not None:
            return self._channels.is_reasoning
        is_inside = self._reasoning is not None and self._reasoning.is_inside
        return is_inside and not self.num_late_chars

    @property
    def may_reason(self) -> bool:
        """Whether the text may go on with reasoning."""
        if self._channels is not None:
            return self._channels.may_reason
        return self._reasoning is not None and not self._reasoning.is_over

    @property
    def is_content(self) -> bool:
        """Whether all further text is content, as it is."""
        is_whole = self._tools is None and not self._must_call
        return is_whole and (self._reasoning is None or self._reasoning.is_over)

    @property
    def is_in_call(self) -> bool:
        """Whether the text ends inside the arguments of a call."""
        if self._tools is None or self._num_found > self.num_calls:
            return False
        return self._tools.is_in_call

    def push(self, text: str) -> Parts:
        """Take the next piece of text; return the parts that are certain now."""
        if self._reasoning is None:
            return self._through_tools(Parts(content=text))
        return self._through_tools(self._reasoning.push(text))

    def finish(self, *, is_cut: bool = False) -> Parts:
        """End the text; return what was held back as its most likely kind of part."""
        late = self._late_call(is_cut)
        last = Parts() if self._reasoning is None else self._reasoning.finish()
        if late is not None:
            return last + late
        parts = self._through_tools(last)
        return (
            parts if self._tools is None else parts + self._kept(self._tools.finish(is_cut=is_cut))
        )

    def _late_call(self, is_cut: bool) -> Parts | None:
        """Return the parts after reasoning that a call has ended; None: there is no such call."""
        if self._reasoning is None or self._tools is None:
            return None
        if not (text := self._reasoning.take_call()):
            return None
        parts = self._tools.push(text) + self._tools.finish(is_cut=is_cut)
        if not parts.calls:
            self._reasoning.give_back(text)
            return None
        self.num_late_chars = len(text)
        return self._kept(parts)

    def _through_tools(self, parts: Parts) -> Parts:
        if self._tools is None or not parts.content:
            return parts
        return Parts(reasoning=parts.reasoning) + self._kept(self._tools.push(parts.content))

    def _kept(self, parts: Parts) -> Parts:
        for piece in parts.calls:
            self._num_found = max(self._num_found, piece.index + 1)
        most = self._num_found if self._max_calls is None else self._max_calls
        parts.calls = [piece for piece in parts.calls if piece.index < most]
        if self._must_call:
            parts.content = ""
        self.num_calls = min(self._num_found, most)
        return parts
