"""Separates reasoning between `<think>` and `</think>` from the answer after it."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.text.parts.interface import SPACE, Parts, held_length

BEGIN, END = "<think>", "</think>"


class Reasoning:
    """Takes answers that may begin with reasoning, in one piece or several in a row.

    Args:
        has_begun: the prompt ends with the begin mark, so the answer begins inside reasoning.
        is_shown: whether reasoning is returned; otherwise it is dropped.
        is_streamed: whether reasoning is returned as it comes; otherwise all of it at its end.
        call_begins: marks with which a call begins. It ends reasoning if no end mark follows, so
            the text from the last such mark on is held back.
    """

    def __init__(
        self,
        has_begun: bool,
        is_shown: bool = True,
        is_streamed: bool = True,
        call_begins: Sequence[str] = (),
    ) -> None:
        self._is_inside = has_begun
        self._is_over = False
        self._is_shown = is_shown
        self._is_streamed = is_streamed
        self._call_begins = call_begins
        self._kept = ""  # reasoning so far that is not streamed
        self._rest = ""
        self._num_searched = 0  # characters of the rest that no mark begins in
        self._has_call = False  # the rest begins with the mark of a call
        self._follows_mark = has_begun  # whitespace comes next, and perhaps a begin mark

    @property
    def is_inside(self) -> bool:
        """Whether the text ends inside reasoning."""
        return self._is_inside

    @property
    def is_over(self) -> bool:
        """Whether no reasoning can follow."""
        return self._is_over

    @property
    def num_undecided(self) -> int:
        """The number of characters at the end of the text that are content or precede reasoning."""
        return 0 if self._is_inside else len(self._rest)

    def push(self, text: str) -> Parts:
        """Take the next piece of text; return the parts that are certain now."""
        self._rest += text
        parts = Parts()
        while not self._is_over and self._step(parts):
            pass
        if self._is_over:
            parts.content, self._rest = self._rest, ""
        parts.reasoning = self._shown(parts.reasoning, is_last=not self._is_inside)
        return parts

    def finish(self) -> Parts:
        """End the text; return what was held back as its most likely kind of part."""
        rest, self._rest = self._rest, ""
        if not self._is_inside:
            return Parts(content=rest)
        return Parts(reasoning=self._shown(rest, is_last=True))

    def take_call(self) -> str:
        """Return the text from the mark of a call on, at the end; "" if there is none."""
        if not self._has_call:
            return ""
        text, self._rest = self._rest, ""
        return text

    def give_back(self, text: str) -> None:
        """Return what was taken, as it is no call."""
        self._rest = text

    # ---- parts ---------------------------------------------------------------------------------

    def _step(self, parts: Parts) -> bool:
        """Go on to another state; False if more text is needed for that."""
        if self._is_inside and not self._follows_mark:
            return self._look_for_end(parts)
        bare = self._rest.lstrip(SPACE)
        if bare.startswith(BEGIN):
            self._is_inside = self._follows_mark = True
            self._rest = bare.removeprefix(BEGIN)
            return True
        if BEGIN.startswith(bare):
            return False
        self._rest = bare if self._follows_mark else self._rest
        self._follows_mark, self._is_over = False, not self._is_inside
        return True

    def _look_for_end(self, parts: Parts) -> bool:
        at = self._rest.find(END, self._num_searched)
        if at >= 0:
            parts.reasoning += self._rest[:at]
            self._rest = self._rest[at + len(END) :]
            self._num_searched, self._has_call = 0, False
            self._is_inside, self._follows_mark = False, True
            return True
        marks = (END, *self._call_begins)
        held = max(held_length(self._rest, mark) for mark in marks)
        if not self._has_call:
            certain = self._up_to_call(len(self._rest) - held)
            parts.reasoning += self._rest[:certain]
            self._rest = self._rest[certain:]
        self._num_searched = max(0, len(self._rest) - len(END))
        return False

    def _up_to_call(self, certain: int) -> int:
        """Return where the first call begins, or else `certain`."""
        found = [at for mark in self._call_begins if (at := self._rest.find(mark)) >= 0]
        self._has_call = bool(found)
        return min(found, default=certain)

    def _shown(self, reasoning: str, is_last: bool) -> str:
        """Return the reasoning that can be returned now."""
        if not self._is_shown:
            return ""
        self._kept += reasoning
        if not (self._is_streamed or is_last):
            return ""
        shown, self._kept = self._kept, ""
        return shown


class ContentStart:
    """Tells where the content of an answer begins, for what counts in content only."""

    def __init__(self, reasoning: Reasoning) -> None:
        self._reasoning = reasoning
        self._held = ""  # it is not known yet what this is

    def push(self, text: str) -> tuple[str, str]:
        """Return the text that precedes the content, and the content, as far as it is known."""
        content = self._reasoning.push(text).content
        whole = self._held + text
        at = len(whole) - (len(content) or self._reasoning.num_undecided)
        self._held = "" if content else whole[at:]
        return whole[:at], content

    def finish(self) -> str:
        """End the text; return what was not known: it is content."""
        held, self._held = self._held, ""
        return held
