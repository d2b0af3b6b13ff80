"""Finds tool calls in an answer's text by the marks of a family of models (`marks.py`).

Text outside of calls is content (`text_around.py`). So is what looks like a call and is none: an
object that names no offered function. Marks inside such an object mean nothing.
"""

from __future__ import annotations

from coordinator.text.parts.interface import (
    SPACE,
    CallReader,
    NotACall,
    Parts,
    Tools,
    first_mark,
)
from coordinator.text.parts.marks import Marks
from coordinator.text.parts.text_around import TextAround


class MarkedCalls:
    """A PartsParser for one family's marks, and the offered functions."""

    def __init__(self, marks: Marks, tools: Tools) -> None:
        self._marks = marks
        self._tools = tools
        self._num_calls = 0
        self._rest = ""  # not consumed yet, or perhaps the beginning of a mark
        self._raw = ""  # since a call's mark: content if it turns out not to be a call
        self._around = TextAround()
        self._call: CallReader | None = None
        self._is_named = False  # whether the piece with the call's name was returned
        self._follows_call = False  # in the same block
        self._is_in_list = False
        self._among_calls = not marks.begins
        self._is_text_only = False

    @property
    def is_in_call(self) -> bool:
        """Whether the text ends inside the arguments of a call."""
        return self._is_named and self._call is not None and not self._call.has_arguments

    def push(self, text: str) -> Parts:
        """Take the next piece of text; return the parts that are certain now."""
        self._rest += text
        parts = Parts()
        while self._rest and self._step(parts):
            pass
        return parts

    def finish(self, *, is_cut: bool = False) -> Parts:
        """End the text; return what was held back as its most likely kind of part."""
        parts = Parts()
        while (call := self._call) is not None:
            told = call.finish(is_cut=is_cut)
            if self._is_named:
                self._add(call, told, parts)
            if not call.is_complete:
                break
            self._over(call, parts)
            parts += self.push("")
        left = self._raw + self._rest
        if self._call is not None and self._is_named:
            left = ""  # it was told, as far as it goes
        elif not self._follows_call or left.strip(SPACE + self._marks.separators + "}]"):
            self._show(left, parts)
        parts.content += self._around.finish()
        self._raw = self._rest = ""
        return parts

    # ---- one step: consumes some of the rest, or returns False if more text is needed ----------

    def _step(self, parts: Parts) -> bool:
        if self._is_text_only:
            self._show(self._taken(len(self._rest)), parts)
            return True
        if self._call is not None:
            self._in_call(self._call, parts)
            return True
        if self._among_calls:
            return self._before_call(parts)
        return self._in_text(parts)

    def _in_text(self, parts: Parts) -> bool:
        at, mark = first_mark(self._rest, self._marks.begins)
        self._show(self._taken(at), parts)
        if not mark:
            return False
        self._among_calls, self._follows_call, self._is_in_list = True, False, False
        if mark != self._marks.opening:
            self._raw = self._taken(len(mark))
        return True

    def _before_call(self, parts: Parts) -> bool:
        """Consume whitespace and separators, then a call, its name, an end mark, or plain text."""
        marks, rest = self._marks, self._rest
        for mark in (*marks.between, marks.opening):
            if rest.startswith(mark):
                return self._at_mark(mark)
            if mark.startswith(rest):
                return False
        if rest[0] in SPACE or rest[0] in self._may_come:
            self._is_in_list = self._is_in_list or rest[0] == "["
            self._raw += self._taken(1)
            return True
        if self._is_in_block and rest[0] == "}":
            self._taken(1)  # one too many
            return True
        return self._named_call(parts) if marks.names_calls else self._give_up(parts)

    def _at_mark(self, mark: str) -> bool:
        if mark == self._marks.opening:
            self._begin_call(self._marks.read(self._tools))
            return True
        self._raw += self._taken(len(mark))
        if mark == self._marks.end and self._is_in_block:
            self._among_calls, self._raw = False, ""
        elif mark == self._marks.begin:
            self._follows_call = self._is_in_list = False
        return True

    @property
    def _is_in_block(self) -> bool:
        """Whether a call came before, and the end of its block has not come."""
        return self._follows_call and (self._is_in_list or self._marks.ends_alone)

    @property
    def _may_come(self) -> str:
        """Single characters that may precede the next call."""
        if self._follows_call:
            return self._marks.separators if self._is_in_list or not self._marks.lists else ""
        return "[" if self._marks.lists and not self._is_in_list else ""

    def _named_call(self, parts: Parts) -> bool:
        head = self._marks.head_of(self._rest)
        if head is None:
            return self._give_up(parts)
        if not head.length:  # it may become one
            return False
        self._raw += self._taken(head.length)
        self._begin_call(self._marks.read(self._tools, head))
        return True

    def _begin_call(self, call: CallReader) -> None:
        self._call, self._is_named = call, False

    def _in_call(self, call: CallReader, parts: Parts) -> None:
        length, arguments, is_none = _run(call, self._rest)
        self._raw += self._taken(length)
        if call.name is not None:
            self._add(call, arguments, parts)
        if call.name is not None:
            self._raw = ""
        if call.is_complete:
            self._over(call, parts)
        elif call.name is not None:
            return
        elif is_none or (call.is_refused and not self._marks.begins):
            self._call = None
            self._leave("", parts)
        elif call.is_refused:  # marks mean nothing up to its end
            self._show(self._raw.removesuffix(call.unread), parts)
            self._raw = call.unread

    def _over(self, call: CallReader, parts: Parts) -> None:
        """Go on behind a call, or what turned out to be none."""
        self._rest = call.unread + self._rest
        self._raw = self._raw.removesuffix(call.unread)
        self._call = None
        if call.name is None:
            self._leave("", parts)
            return
        self._is_named, self._follows_call, self._raw = False, True, ""
        self._num_calls += 1

    def _add(self, call: CallReader, arguments: str, parts: Parts) -> None:
        if not self._is_named:
            self._is_named = True
            self._around.call_begins()
            parts.called(self._num_calls, call.name, arguments, call.call_id)
        elif arguments:
            parts.called(self._num_calls, None, arguments)

    def _give_up(self, parts: Parts) -> bool:
        self._leave(self._taken(1), parts)
        return True

    def _leave(self, text: str, parts: Parts) -> None:
        """Treat what was read since the mark, and `text`, as text."""
        raw, self._raw = self._raw, ""
        self._among_calls = self._follows_call = False
        self._is_text_only = not self._marks.begins
        self._show(raw + text, parts)

    def _show(self, text: str, parts: Parts) -> None:
        parts.content += self._around.shown(text)

    def _taken(self, length: int) -> str:
        taken, self._rest = self._rest[:length], self._rest[length:]
        return taken


def _run(call: CallReader, text: str) -> tuple[int, str, bool]:
    """Let a call read on; return the characters it took, its arguments, whether it is none."""
    told: list[str] = []
    for at, char in enumerate(text):
        try:
            is_taken = call.push(char)
        except NotACall:
            return at + 1, "", True
        told.append(call.take())
        if call.is_complete:
            return at + is_taken, "".join(told), False
    return len(text), "".join(told), False
