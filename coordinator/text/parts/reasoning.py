"""Separates reasoning between `<think>` and `</think>` from the answer after it."""

from __future__ import annotations

from coordinator.text.parts.interface import Parts, held_length

BEGIN, END = "<think>", "</think>"
_SPACE = " \t\r\n"


class Reasoning:
    """A PartsParser for answers that may begin with reasoning.

    Args:
        has_begun: the prompt ends with the begin mark, so the answer begins inside reasoning.
        is_shown: whether reasoning is returned; otherwise it is dropped.
        is_streamed: whether reasoning is returned as it comes; otherwise all of it at its end.
    """

    def __init__(self, has_begun: bool, is_shown: bool = True, is_streamed: bool = True) -> None:
        self._is_inside = has_begun
        self._is_over = False
        self._is_shown = is_shown
        self._is_streamed = is_streamed
        self._kept = ""  # reasoning so far that is not streamed
        self._rest = ""
        self._skips_space = has_begun  # drop whitespace after a mark

    @property
    def is_inside(self) -> bool:
        """Whether the text ends inside reasoning."""
        return self._is_inside

    @property
    def is_over(self) -> bool:
        """Whether no reasoning can follow."""
        return self._is_over

    def push(self, text: str) -> Parts:
        """See PartsParser.push."""
        self._rest += text
        parts = Parts()
        if not (self._is_inside or self._is_over):
            self._look_at_beginning()
        if self._is_inside:
            self._look_for_end(parts)
        if self._is_over:
            parts.content = self._bare(self._rest)
            self._rest = ""
        parts.reasoning = self._shown(parts.reasoning, is_last=self._is_over)
        return parts

    def finish(self) -> Parts:
        """See PartsParser.finish."""
        rest, self._rest = self._rest, ""
        if not self._is_inside:
            return Parts(content=rest)
        return Parts(reasoning=self._shown(rest, is_last=True))

    def _shown(self, reasoning: str, is_last: bool) -> str:
        """Return the reasoning that can be returned now."""
        if not self._is_shown:
            return ""
        self._kept += reasoning
        if not (self._is_streamed or is_last):
            return ""
        shown, self._kept = self._kept, ""
        return shown

    def _look_at_beginning(self) -> None:
        bare = self._rest.lstrip(_SPACE)
        if bare.startswith(BEGIN):
            self._is_inside, self._skips_space = True, True
            self._rest = bare.removeprefix(BEGIN)
        elif bare and not BEGIN.startswith(bare):
            self._is_over = True

    def _look_for_end(self, parts: Parts) -> None:
        at = self._rest.find(END)
        if at >= 0:
            parts.reasoning = self._bare(self._rest[:at])
            self._rest = self._rest[at + len(END) :]
            self._is_inside, self._is_over, self._skips_space = False, True, True
            return
        certain = len(self._rest) - held_length(self._rest, END)
        parts.reasoning, self._rest = self._bare(self._rest[:certain]), self._rest[certain:]

    def _bare(self, text: str) -> str:
        """Return text without the whitespace after a mark, which may arrive in several pieces."""
        if not self._skips_space:
            return text
        bare = text.lstrip(_SPACE)
        self._skips_space = not bare
        return bare
