"""Parses tool calls after a marker: Hermes and Qwen (`<tool_call>{...}</tool_call>`), Mistral
(`[TOOL_CALLS][{...}, {...}]`, newer `[TOOL_CALLS]name{...}`), Llama 3 (the whole answer is
`{...}; {...}`, optionally after `<|python_tag|>`).

Text that turns out not to be a call is returned as content, including the marker.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.text.parts.interface import CallPiece, Parts, held_length
from coordinator.text.parts.json_call import JsonCall, NotACall

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks with which a family of models separates calls from text."""

    begin: str  # before a call or a list of calls; empty: calls only at the start of the answer
    end: str = ""  # after a call or list
    between: str = ""  # single characters that may surround the calls of a list
    optional: str = ""  # may precede the first call
    names_calls: bool = False  # NAME{arguments} is allowed, too
    after_name: str = ""  # may be between NAME and its arguments


HERMES = Marks(begin="<tool_call>", end="</tool_call>")
LLAMA3 = Marks(begin="", between=";,", optional="<|python_tag|>")
MISTRAL = Marks(begin="[TOOL_CALLS]", between="[],", names_calls=True, after_name="[ARGS]")


class MarkedCalls:
    """A PartsParser for one family's marks."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._num_calls = 0
        self._rest = ""  # not consumed yet, or perhaps the beginning of a marker
        self._raw = ""  # text since a call's marker: content if it turns out not to be a call
        self._space = ""  # whitespace after text or a call; dropped if another call follows
        self._call: JsonCall | None = None
        self._is_named = False  # whether the piece with the call's name was returned
        self._follows_call = False
        self._among_calls = not marks.begin
        self._is_text_only = False

    def push(self, text: str) -> Parts:
        """See PartsParser.push."""
        self._rest += text
        parts = Parts()
        while self._rest and self._step(parts):
            pass
        return parts

    def finish(self) -> Parts:
        """See PartsParser.finish."""
        parts = Parts()
        if not self._is_named or self._call is None:  # else truncated arguments
            left = self._raw + self._rest
            if not self._num_calls or left.strip(_SPACE + self._marks.between):
                self._show(left, parts)
            if not self._num_calls:
                parts.content += self._space
        self._raw = self._rest = self._space = ""
        return parts

    # ---- one step: consumes some of the rest, or returns False if more text is needed ----------

    def _step(self, parts: Parts) -> bool:
        if self._is_text_only:
            self._show(self._taken(len(self._rest)), parts)
            return True
        if self._call is not None:
            return self._in_call(self._call, parts)
        if self._among_calls:
            return self._before_call(parts)
        return self._in_text(parts)

    def _in_text(self, parts: Parts) -> bool:
        begin = self._marks.begin
        at = self._rest.find(begin)
        if at >= 0:
            self._show(self._taken(at), parts)
            self._raw = self._taken(len(begin))
            self._among_calls = True
            return True
        certain = len(self._rest) - held_length(self._rest, begin)
        self._show(self._taken(certain), parts)
        return False

    def _before_call(self, parts: Parts) -> bool:
        """Consume whitespace and separators, then a call, its name, an end mark, or plain text."""
        marks, rest = self._marks, self._rest
        for mark in filter(None, (marks.begin, marks.end, marks.optional)):
            if rest.startswith(mark):
                self._raw += self._taken(len(mark))
                if mark == marks.end:
                    self._among_calls, self._raw = False, ""
                return True
            if mark.startswith(rest):
                return False
        if rest[0] in _SPACE or rest[0] in marks.between:
            self._raw += self._taken(1)
            return True
        if rest[0] == "{":
            self._begin_call()
            return True
        if marks.names_calls and self._name_length() is not None:
            return self._named_call()
        self._give_up(parts)
        return True

    def _name_length(self) -> int | None:
        """Return the length of a possible name before `{`; None if it is not a name.

        len(rest) means that more text is needed.
        """
        for at, char in enumerate(self._rest):
            if char == "{":
                return at
            if not (char.isalnum() or char in "_-.") and char not in self._marks.after_name:
                return None
        return len(self._rest)

    def _named_call(self) -> bool:
        length = self._name_length()
        if length is None or length == len(self._rest):
            return False
        text = self._taken(length)
        self._raw += text
        self._begin_call(text.removesuffix(self._marks.after_name))
        return True

    def _begin_call(self, name: str | None = None) -> None:
        self._call, self._is_named, self._space = JsonCall(name), False, ""

    def _in_call(self, call: JsonCall, parts: Parts) -> bool:
        char = self._taken(1)
        self._raw += char
        try:
            call.push(char)
        except NotACall:
            self._call = None
            if not self._is_named:  # else pieces of it were already returned
                self._give_up(parts)
            return True
        more = call.take()
        if more or (call.name is not None and not self._is_named):
            self._add(call, more, parts)
        if call.is_complete:
            self._call, self._raw = None, ""
            self._num_calls += 1
            self._follows_call = True
        return True

    def _add(self, call: JsonCall, arguments: str, parts: Parts) -> None:
        name = None if self._is_named else call.name
        self._is_named = True
        last = parts.calls[-1] if parts.calls else None
        if last is not None and last.index == self._num_calls and name is None:
            parts.calls[-1] = CallPiece(last.index, last.name, last.arguments + arguments)
        else:
            parts.calls.append(CallPiece(self._num_calls, name, arguments))

    def _give_up(self, parts: Parts) -> None:
        """Treat what was read since the marker, and the next character, as text."""
        raw, self._raw = self._raw, ""
        self._among_calls = False
        self._is_text_only = not self._marks.begin
        self._show(raw + self._taken(1), parts)

    def _show(self, text: str, parts: Parts) -> None:
        """Add text as content, without the whitespace before and after calls."""
        text = self._space + (text.lstrip(_SPACE) if self._follows_call else text)
        self._follows_call = self._follows_call and not text
        bare = text.rstrip(_SPACE)
        self._space = text[len(bare) :]
        parts.content += bare

    def _taken(self, length: int) -> str:
        taken, self._rest = self._rest[:length], self._rest[length:]
        return taken
