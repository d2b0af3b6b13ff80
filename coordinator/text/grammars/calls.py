"""Grammars of tool calls in the models' formats, with arguments that match the functions' schemas.

They produce what `coordinator/text/parts` parses, spelled as in the models' chat templates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.text.grammars.outputs import Part, json_part, quoted
from coordinator.text.parts import ToolFormat
from coordinator.text.parts.marked_calls import HERMES, LLAMA3, MISTRAL
from pdserve.errors import InvalidRequest

MAX_CALLS = 32  # in one answer

SpecialId = Callable[[str], int | None]  # a special token's text |-> its id


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that may be called."""

    name: str
    parameters: dict[str, Any] | None  # None: it takes no arguments
    param: str  # the request's parameter, for errors


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """One call or several calls of the offered tools."""

    tool_format: ToolFormat
    tools: Sequence[OfferedTool]
    is_single: bool
    special_id: SpecialId

    def rules(self) -> str:
        """Return Lark rules, which define `calls`; arguments are separate grammars (`parts`)."""
        bodies = [f"body_{i}" for i in range(len(self.tools))]
        lines = [self._calls(), f"body: {' | '.join(bodies)}"]
        lines += [f"{body}: {self._body(i)}" for i, body in enumerate(bodies)]
        return "\n".join(lines)

    def parts(self) -> dict[str, Part]:
        """Return name |-> grammar of a tool's arguments. Raises InvalidRequest."""
        return {f"arguments_{i}": _arguments(tool) for i, tool in enumerate(self.tools)}

    def _calls(self) -> str:
        if self.tool_format is ToolFormat.HERMES:
            call = f'{self._mark(HERMES.begin)} "\\n" body "\\n" {self._mark(HERMES.end)}'
            return f"calls: {self._several('call', quoted(chr(10)))}\ncall: {call}"
        if self.tool_format is ToolFormat.LLAMA3:
            return f"calls: {self._mark(LLAMA3.optional)}? {self._several('body', quoted('; '))}"
        begin = self._mark(MISTRAL.begin)
        if self._names_calls:
            return f"calls: {self._several('call', '')}\ncall: {begin} body"
        return f'calls: {begin} "[" {self._several("body", quoted(", "))} "]"'

    def _body(self, index: int) -> str:
        name, arguments = self.tools[index].name, f"@arguments_{index}"
        if self._names_calls:
            return f"{quoted(name)} {self._mark(MISTRAL.after_name)} {arguments}"
        key = "parameters" if self.tool_format is ToolFormat.LLAMA3 else "arguments"
        head = f'{{"name": {quoted(name)}, "{key}": '
        return f"{quoted(head)} {arguments} {quoted('}')}"

    @property
    def _names_calls(self) -> bool:
        """Whether calls are written NAME[ARGS]{...}: newer Mistral tokenizers have that token."""
        is_mistral = self.tool_format is ToolFormat.MISTRAL
        return is_mistral and self.special_id(MISTRAL.after_name) is not None

    def _several(self, call: str, between: str) -> str:
        return call if self.is_single else f"{call} ({between} {call}){{0,{MAX_CALLS - 1}}}"

    def _mark(self, text: str) -> str:
        return mark(text, self.special_id)


def mark(text: str, special_id: SpecialId) -> str:
    """Return a mark as a special token, or spelled out if the tokenizer has none."""
    token_id = special_id(text)
    return quoted(text) if token_id is None else f"<[{token_id}]>"


def check_format(tool_format: ToolFormat, *, has_output: bool) -> None:
    """Check that a grammar can be made for calls in this format, beside output if there is any.

    Raises InvalidRequest if not.
    """
    if tool_format is ToolFormat.LLAMA3 and has_output:
        raise InvalidRequest(
            "this model writes tool calls as plain JSON, which cannot be told from structured "
            "output; with structured output, 'tool_choice' must be 'none' or 'required'",
            "tool_choice",
        )
    if tool_format is ToolFormat.PYTHONIC:
        raise InvalidRequest(
            "this model writes tool calls as Python, which pdserve cannot enforce: 'tool_choice' "
            "must be 'none', or 'auto' without structured output",
            "tool_choice",
        )


def _arguments(tool: OfferedTool) -> Part:
    if tool.parameters is None:
        return json_part({"type": "object", "additionalProperties": False}, tool.param)
    if tool.parameters.get("type", "object") != "object":
        raise InvalidRequest(f"{tool.param!r} must be of type 'object'", tool.param)
    return json_part(tool.parameters | {"type": "object"}, tool.param)
