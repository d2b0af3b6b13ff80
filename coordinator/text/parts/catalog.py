"""The supported formats of tool calls, and the detection of a model's format."""

from __future__ import annotations

from enum import StrEnum

from coordinator.text.parts.harmony import CHANNEL, MESSAGE, Harmony
from coordinator.text.parts.harmony import MARKS as HARMONY_MARKS
from coordinator.text.parts.interface import PartsParser, Tools
from coordinator.text.parts.marked_calls import MarkedCalls
from coordinator.text.parts.marks import (
    ARGS,
    CALL_ID,
    HERMES,
    LLAMA3,
    MISTRAL,
    QWEN3_CODER,
    Marks,
)
from coordinator.text.parts.pythonic_calls import BEGINS, END, PythonicCalls
from coordinator.text.parts.tagged_call import FUNCTION, PARAMETER


class ToolFormat(StrEnum):
    """How a model writes tool calls."""

    HARMONY = "harmony"  # gpt-oss: with reasoning
    HERMES = "hermes"  # Hermes, Qwen 2.5 and 3
    LLAMA3 = "llama3"  # Llama 3.1 and later, JSON
    MISTRAL = "mistral"
    PYTHONIC = "pythonic"  # Llama 3.2 and 4
    QWEN3_CODER = "qwen3_coder"  # Qwen3-Coder and later

    def parser(self, tools: Tools) -> PartsParser:
        """Return a new parser for one answer, which finds calls of these functions."""
        if self is ToolFormat.HARMONY:
            return Harmony(tools)
        marks = _MARKS.get(self)
        return PythonicCalls(tools) if marks is None else MarkedCalls(marks, tools)

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks of calls, which may be special tokens of the tokenizer."""
        match self:
            case ToolFormat.HARMONY:
                return HARMONY_MARKS
            case ToolFormat.PYTHONIC:
                return (*BEGINS, END)
            case ToolFormat.MISTRAL:
                return (MISTRAL.begin, CALL_ID, ARGS)
        return _MARKS[self].between

    @property
    def begins(self) -> tuple[str, ...]:
        """Marks with which a call begins, wherever they are."""
        if self is ToolFormat.HARMONY:
            return ()  # reasoning ends by itself
        marks = _MARKS.get(self)
        return BEGINS if marks is None else marks.begins or (marks.optional,)


_MARKS: dict[ToolFormat, Marks] = {
    ToolFormat.HERMES: HERMES,
    ToolFormat.LLAMA3: LLAMA3,
    ToolFormat.MISTRAL: MISTRAL,
    ToolFormat.QWEN3_CODER: QWEN3_CODER,
}
# Of families that have none of these formats: calls would be taken for text.
_OTHERS = (
    "<arg_key>",
    "<invoke",
    "<|tool_call|>",
    "<｜tool▁call",
    "<|tool_calls_section",
    "<TOOLCALL>",
    "<|START_ACTION|>",
)


def detect_tool_format(chat_template: str) -> ToolFormat | None:
    """Detect the format from what a template writes around earlier calls; None if unknown."""
    if all(mark in chat_template for mark in (CHANNEL, MESSAGE)):
        return ToolFormat.HARMONY
    if "tools" not in chat_template or any(mark in chat_template for mark in _OTHERS):
        return None
    if FUNCTION in chat_template and PARAMETER in chat_template:
        return ToolFormat.QWEN3_CODER
    if HERMES.begin in chat_template:
        return ToolFormat.HERMES
    if MISTRAL.begin in chat_template:
        return ToolFormat.MISTRAL
    if '"parameters": ' in chat_template or LLAMA3.optional in chat_template:
        return ToolFormat.LLAMA3
    return None
