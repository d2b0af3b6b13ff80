"""The text around calls: content byte for byte, but for whitespace between calls and its ends."""

from __future__ import annotations

from coordinator.text.parts.interface import SPACE


class TextAround:
    """Decides what of the text outside of calls is shown, and when."""

    def __init__(self) -> None:
        self._before = ""  # whitespace between text and the calls after it
        self._space = ""  # whitespace that the text so far ends with
        self._is_in_text = False  # since the last call, or the beginning
        self._has_text = self._has_calls = False

    def shown(self, text: str) -> str:
        """Return what can be shown now that this text came."""
        bare = text.rstrip(SPACE)
        if not bare:
            self._space += text
            return ""
        bare, self._space = self._space + bare, text[len(bare) :]
        if self._has_calls and not self._has_text:
            bare = bare.lstrip(SPACE)
        before, self._before = self._before, ""
        self._is_in_text = self._has_text = True
        return before + bare

    def call_begins(self) -> None:
        """A call comes next."""
        if self._is_in_text:
            self._before = self._space
        self._space, self._is_in_text, self._has_calls = "", False, True

    def finish(self) -> str:
        """End the text; return what is left of it."""
        space, self._space = self._space, ""
        return space if self._is_in_text or not self._has_calls else ""
