"""Incremental parser of one tool call as a JSON object, `{"name": ..., "arguments": {...}}`.

The arguments' value is passed on as it arrives, so that long arguments are streamed. Keys may be in
any order; arguments that come before the name are held until the name is known. The call is over
where its arguments' braces balance, even if the object around them is never closed. A string with a
mark that ends calls may be one whose own end the model forgot (`missing_end.py`).
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from coordinator.text.parts.as_written import QUOTES
from coordinator.text.parts.interface import SPACE, NotACall, Tools
from coordinator.text.parts.json_text import JsonText
from coordinator.text.parts.missing_end import MissingEnd

_BARE = re.compile(r"(['`]?)([\w.-]+)\1")
_ARGUMENT_KEYS = ("arguments", "parameters")  # the second is Llama 3's


class _Place(Enum):
    """What the object goes on with."""

    BRACE = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    INSIDE = auto()  # of a key or value
    OVER = auto()


class JsonCall:
    """A CallReader of an object.

    Args:
        tools: the offered functions; an object that names no such function is refused.
        needs_arguments: a call without arguments is refused; otherwise it has none.
        mark: what ends calls, or begins others, also where the end of a string was forgotten.
        name: the function's name if it precedes the object, which then holds only the arguments.
        call_id: likewise.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        needs_arguments: bool,
        mark: str = "",
        name: str | None = None,
        call_id: str | None = None,
    ) -> None:
        self.name: str | None = None
        self.call_id = call_id
        self.is_complete = False
        self.is_refused = name is not None and name not in tools
        self.has_arguments = False
        self._tools = tools
        self._needs_arguments = needs_arguments
        self._is_arguments_alone = name is not None
        self._named = name  # the function, whether this becomes a call of it or not
        self._place = _Place.BRACE if name is None else _Place.VALUE
        self._key: str | None = None if name is None else "arguments"
        self._value = JsonText()
        self._missing_end = MissingEnd(mark)
        self._text: list[str] = []  # of a key, or of a value that is not passed on
        self._arguments: list[str] = []  # not taken yet
        self._are_passed_on = False  # the arguments, as they come

    @property
    def unread(self) -> str:
        """Its last characters, which are not certain to belong to it."""
        return self._missing_end.text

    def push(self, char: str) -> bool:
        """Take one character; False: the call ended before it."""
        value, was_in_string = self._value, self._value.is_in_string
        is_taken = self._step(char)
        if is_taken and self._missing_end.push(char, value, was_in_string=was_in_string):
            self._end_before_mark()
        return is_taken

    def take(self) -> str:
        """Return further JSON text of the arguments, once `name` is known."""
        if self.name is None:
            return ""
        num_certain = len(self._arguments) - (0 if self.has_arguments else len(self._missing_end))
        if num_certain <= 0:
            return ""
        taken, self._arguments = self._arguments[:num_certain], self._arguments[num_certain:]
        return "".join(taken)

    def finish(self, *, is_cut: bool) -> str:
        """End the text; return what was held back of the arguments."""
        if self._missing_end.is_possible and not is_cut:
            self._end_before_mark()
            return self.take()
        if self.name is None or self.has_arguments:
            return ""
        self._missing_end.clear()
        return self.take() + self._value.cut()

    # ---- parts ---------------------------------------------------------------------------------

    def _step(self, char: str) -> bool:
        match self._place:
            case _Place.BRACE:
                self._place = _Place.KEY
            case _Place.KEY:
                return self._before_key(char)
            case _Place.COLON:
                if char not in SPACE:
                    self._place = _Place.VALUE
                    return char == ":" or self._break()
            case _Place.VALUE:
                if char not in SPACE:
                    return self._begin_value(char)
            case _Place.INSIDE:
                return self._inside(char)
            case _Place.OVER:
                return False
        return True

    def _before_key(self, char: str) -> bool:
        if char in SPACE or char == ",":
            return True
        if char == "}":
            self._end()
            return True
        if not (char in QUOTES or char.isalnum() or char == "_"):
            return self._break()
        self._key = None
        return self._begin_value(char)

    def _begin_value(self, char: str) -> bool:
        self._value, self._text, self._place = JsonText(), [], _Place.INSIDE
        if self._holds_arguments:
            self._are_passed_on = char == "{"
            self.is_refused = self.is_refused or char not in '{"nN'  # null, or Python's None
            self._name_it()
        return self._inside(char)

    @property
    def _holds_arguments(self) -> bool:
        return self._key in _ARGUMENT_KEYS and not self.has_arguments

    def _inside(self, char: str) -> bool:
        text = self._value.push(char)
        if text is not None:
            self._add(text)
        elif char in self._ends_value or (self._holds_arguments and self._are_passed_on):
            self._add(self._value.close())
        else:
            return self._break()
        if self._value.is_complete:
            self._end_value()
            return text is not None or self.push(char)
        return True

    @property
    def _ends_value(self) -> str:
        return SPACE + (":" if self._key is None else ",}")

    def _add(self, text: str) -> None:
        if self._holds_arguments and self._are_passed_on:
            self._arguments.append(text)
        else:
            self._text.append(text)

    def _end_value(self) -> None:
        key, text, self._place = self._key, "".join(self._text), _Place.KEY
        if key is None:
            self._key, self._place = _word(text), _Place.COLON
        elif self._holds_arguments:
            if not self._are_passed_on:
                self._set_arguments(text)
            self.has_arguments = True
            if self._is_arguments_alone:
                self._end()
        elif key == "name" and self._named is None:
            self._named = _word(text)
            self.is_refused = self.is_refused or self._named not in self._tools
        elif key == "id" and self.call_id is None and self.name is None:
            self.call_id = _word(text) or None  # one that comes later would be too late
        self._name_it()

    def _set_arguments(self, text: str) -> None:
        """Take arguments that are no object: none, or a string that holds an object."""
        text = "{}" if text == "null" else _string(text) or "{}"
        try:
            value = json.loads(text, strict=False)
            is_same = text.isprintable()  # neither a raw line break nor half a character
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            self._arguments = [text if is_same else json.dumps(value)]
            self._are_passed_on = True
        elif value is None and text.lstrip().startswith("{"):  # no JSON: it goes on as it is
            self._arguments = [text.encode(errors="replace").decode()]
            self._are_passed_on = True
        else:
            self.is_refused = True

    def _name_it(self) -> None:
        """Make the name known once this is certainly a call."""
        if self._named is not None and self._are_passed_on and not self.is_refused:
            self.name = self._named

    def _end(self) -> None:
        if self.name is None and not self._are_passed_on:
            self._arguments, self._are_passed_on = ["{}"], True
            self.is_refused = self.is_refused or self._needs_arguments or self._named is None
            self._name_it()
        self.is_refused = self.name is None
        self._place, self.is_complete, self.has_arguments = _Place.OVER, True, True

    def _end_before_mark(self) -> None:
        """End where a string has a mark: the rest is not the call's."""
        num_certain = len(self._arguments) - len(self._missing_end)
        self._arguments = self._arguments[: max(0, num_certain)]
        self.is_refused = self.name is None
        self._place, self.is_complete, self.has_arguments = _Place.OVER, True, True

    def _break(self) -> bool:
        """End the call before a character that no object goes on with. Raises NotACall."""
        if self.name is None and not self.is_refused:
            raise NotACall
        self._place, self.is_complete = _Place.OVER, True
        return False


def _string(text: str) -> str:
    """Return what a JSON string stands for; "" for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""


def _word(text: str) -> str:
    """Return a name or a key, which may be in other quotes than JSON's, or in none."""
    bare = _BARE.fullmatch(text)
    return bare[2] if bare and not text[0].isdigit() else _string(text)
