"""Incremental parser of one tool call as a JSON object, `{"name": ..., "arguments": {...}}`.

The arguments' value is passed on as it arrives, so that long arguments are streamed. Keys may be in
any order; arguments that come before the name are held until the name is known. The call is over
where its arguments' braces balance, even if the object around them is never closed.
"""

from __future__ import annotations

import json
from enum import Enum, auto

from coordinator.text.parts.interface import SPACE, NotACall, Tools
from coordinator.text.parts.json_text import JsonText

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
        name: the function's name if it precedes the object, which then holds only the arguments.
        call_id: likewise.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        needs_arguments: bool,
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
        self._text: list[str] = []  # of a key, or of a value that is not passed on
        self._arguments: list[str] = []  # not taken yet
        self._are_passed_on = False  # the arguments, as they come

    @property
    def unread(self) -> str:
        """Its last characters, which are not certain to belong to it."""
        return ""

    def push(self, char: str) -> bool:
        """Take one character; False: the call ended before it."""
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

    def take(self) -> str:
        """Return further JSON text of the arguments, once `name` is known."""
        if self.name is None:
            return ""
        taken, self._arguments = self._arguments, []
        return "".join(taken)

    def finish(self) -> str:
        """End the text; return what was held back of the arguments."""
        if self.name is None or self.has_arguments:
            return ""
        return self.take() + self._value.cut()

    # ---- parts ---------------------------------------------------------------------------------

    def _before_key(self, char: str) -> bool:
        if char in SPACE or char == ",":
            return True
        if char == "}":
            self._end()
            return True
        if char != '"':
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
        elif char in SPACE or char in ",}" or (self._holds_arguments and self._are_passed_on):
            self._add(self._value.close())
        else:
            return self._break()
        if self._value.is_complete:
            self._end_value()
            return text is not None or self.push(char)
        return True

    def _add(self, text: str) -> None:
        if self._holds_arguments and self._are_passed_on:
            self._arguments.append(text)
        else:
            self._text.append(text)

    def _end_value(self) -> None:
        key, text, self._place = self._key, "".join(self._text), _Place.KEY
        if key is None:
            self._key, self._place = _string(text), _Place.COLON
        elif self._holds_arguments:
            if not self._are_passed_on:
                self._set_arguments(text)
            self.has_arguments = True
            if self._is_arguments_alone:
                self._end()
        elif key == "name" and self._named is None:
            self._named = _string(text)
            self.is_refused = self.is_refused or self._named not in self._tools
        elif key == "id" and self.call_id is None and self.name is None:
            self.call_id = _string(text) or None  # one that comes later would be too late
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
