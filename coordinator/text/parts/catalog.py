"""The supported formats of tool calls, and the detection of a model's format."""

from __future__ import annotations

from enum import StrEnum

from coordinator.text.parts.interface import PartsParser
from coordinator.text.parts.marked_calls import HERMES, LLAMA3, MISTRAL, MarkedCalls
from coordinator.text.parts.pythonic_calls import PythonicCalls


class ToolFormat(StrEnum):
    """How a model writes tool calls."""

    HERMES = "hermes"  # Hermes, Qwen 2.5 and 3
    LLAMA3 = "llama3"  # Llama 3.1 and later, JSON
    MISTRAL = "mistral"
    PYTHONIC = "pythonic"  # Llama 3.2 and 4

    def parser(self) -> PartsParser:
        """Return a new parser for one answer."""
        match self:
            case ToolFormat.HERMES:
                return MarkedCalls(HERMES)
            case ToolFormat.LLAMA3:
                return MarkedCalls(LLAMA3)
            case ToolFormat.MISTRAL:
                return MarkedCalls(MISTRAL)
            case ToolFormat.PYTHONIC:
                return PythonicCalls()

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks of calls, which may be special tokens of the tokenizer."""
        match self:
            case ToolFormat.HERMES:
                return (HERMES.begin, HERMES.end)
            case ToolFormat.MISTRAL:
                return (MISTRAL.begin, MISTRAL.after_name)
        return (LLAMA3.optional,)


def detect_tool_format(chat_template: str) -> ToolFormat | None:
    """Detect the format from what a template writes around earlier calls; None if unknown."""
    if "tools" not in chat_template:
        return None
    if HERMES.begin in chat_template:
        return ToolFormat.HERMES
    if MISTRAL.begin in chat_template:
        return ToolFormat.MISTRAL
    if '"parameters": ' in chat_template or LLAMA3.optional in chat_template:
        return ToolFormat.LLAMA3
    return None
