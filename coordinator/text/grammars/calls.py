"""Grammars of tool calls in the models' formats, with arguments that match the functions' schemas.

They produce what `coordinator/text/parts` parses, spelled as in the models' chat templates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.text.grammars.argument_lists import ArgumentList, shared_rules
from coordinator.text.grammars.outputs import Part, json_part, quoted, text_up_to, text_without
from coordinator.text.parts import ToolFormat
from coordinator.text.parts.harmony import CHANNEL, CONSTRAIN, MESSAGE
from coordinator.text.parts.marks import ARGS, CALL_ID, HERMES, LLAMA3, MISTRAL
from coordinator.text.parts.reasoning import BEGIN, END
from pdserve.shared.errors import InvalidRequest

MAX_CALLS = 32  # in one answer
MARKED = frozenset(
    {ToolFormat.HERMES, ToolFormat.MISTRAL, ToolFormat.QWEN3_CODER}
)  # calls can be told from text

FindToken = Callable[[str], int | None]  # a token's text |-> its id


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
    find_token: FindToken
    may_be_text: bool = False  # calls are optional, and may follow text; the format must have marks

    def rules(self) -> str:
        """Return Lark rules, which define `calls`; arguments are separate grammars (`parts`)."""
        lines = [*self._calls(), f"body: {' | '.join(f'body_{i}' for i in range(len(self.tools)))}"]
        for i, tool in enumerate(self.tools):
            match self.tool_format:
                case ToolFormat.QWEN3_CODER:
                    lines += self._list(i).tagged(tool.name)
                case ToolFormat.PYTHONIC:
                    lines += self._list(i).pythonic(tool.name)
                case _:
                    lines.append(f"body_{i}: {self._body(i)}")
        if self.tool_format is ToolFormat.QWEN3_CODER:
            lines += shared_rules()
        return "\n".join(lines)

    def parts(self) -> dict[str, Part]:
        """Return name |-> grammar of arguments, or of an argument. Raises InvalidRequest."""
        parts: dict[str, Part] = {}
        for i in range(len(self.tools)):
            parts |= self._parts_of(i)
        return parts

    @property
    def params(self) -> dict[str, str]:
        """The names of `parts` |-> the parameters that they are of. Raises InvalidRequest."""
        return {name: tool.param for i, tool in enumerate(self.tools) for name in self._parts_of(i)}

    def _parts_of(self, index: int) -> dict[str, Part]:
        tool = self.tools[index]
        if self.tool_format not in (ToolFormat.QWEN3_CODER, ToolFormat.PYTHONIC):
            return {f"arguments_{index}": _arguments(tool)}
        arguments = self._list(index)
        is_tagged = self.tool_format is ToolFormat.QWEN3_CODER
        (arguments.tagged if is_tagged else arguments.pythonic)(tool.name)
        return arguments.parts

    def _list(self, index: int) -> ArgumentList:
        tool = self.tools[index]
        return ArgumentList(index, tool.parameters, tool.param)

    def _calls(self) -> list[str]:
        if self.tool_format is ToolFormat.LLAMA3:
            return [f"calls: {self._mark(LLAMA3.optional)}? {self._several('body', quoted('; '))}"]
        if self.tool_format is ToolFormat.HARMONY:
            return [f'calls: {self._mark(CHANNEL)} "commentary to=" body']
        if self.tool_format is ToolFormat.PYTHONIC:
            return [f'calls: "[" {self._several("body", quoted(", "))} "]"']
        if self.tool_format in (ToolFormat.HERMES, ToolFormat.QWEN3_CODER):
            begin, more = HERMES.begin, self._more(HERMES.begin, quoted("\n"))
            rest = f'"\\n" body "\\n" {self._mark(HERMES.end)}'
        elif self._names_calls:
            begin, rest, more = MISTRAL.begin, "body", self._more(MISTRAL.begin, "")
        else:
            begin, rest, more = (
                MISTRAL.begin,
                f'/ ?\\[/ {self._several("body", quoted(", "))} "]"',
                "",
            )
        calls = f"lead rest {more}"
        if self.may_be_text:
            calls = f"{self._reasoning()}({calls} | TEXT)"
        return [f"calls: {calls}", f"rest: {rest}", *self._lead(begin)]

    def _more(self, begin: str, between: str) -> str:
        """Return the calls that may follow the first one, each after a mark of its own."""
        if self.is_single:
            return ""
        return f"({between} {self._mark(begin)} rest){{0,{MAX_CALLS - 1}}}"

    def _lead(self, begin: str) -> list[str]:
        """Return the rules of what comes before the rest of the first call: text, then its mark."""
        if not self.may_be_text:
            return [f"lead: {self._mark(begin)}"]
        text = f"TEXT: {text_without(begin)}"
        if self.find_token(begin) is None:
            return [f"lead[lazy]: {text_up_to(begin)}", text]
        return [f"lead: TEXT {self._mark(begin)}", text]

    def _reasoning(self) -> str:
        """Return what may precede other text: any text that ends with a mark of reasoning.

        The marks have to be named, as the library does not take such tokens for text.
        """
        ids = [self.find_token(text) for text in (BEGIN, END)]
        marks = ",".join(str(token_id) for token_id in ids if token_id is not None)
        return f"(TEXT <[{marks}]>)* " if marks else ""

    def _body(self, index: int) -> str:
        name, arguments = self.tools[index].name, f"@arguments_{index}"
        if self._names_calls:
            return f"{quoted(name)} {self._written_id()}{self._mark(ARGS)} {arguments}"
        if self.tool_format is ToolFormat.HARMONY:
            begin = f'/ ?/ {self._mark(CONSTRAIN)} "json" {self._mark(MESSAGE)}'
            return f"{quoted('functions.' + name)} {begin} {arguments}"
        key = "parameters" if self.tool_format is ToolFormat.LLAMA3 else "arguments"
        head = f'{{"name": {quoted(name)}, "{key}": '
        return f"{quoted(head)} {arguments} {quoted('}')}"

    @property
    def _names_calls(self) -> bool:
        """Whether calls are written NAME[ARGS]{...}: newer Mistral tokenizers have that token."""
        is_mistral = self.tool_format is ToolFormat.MISTRAL
        return is_mistral and self.find_token(ARGS) is not None

    def _written_id(self) -> str:
        """Return the id that a call may have: some Mistral models write one."""
        mark_id = self.find_token(CALL_ID)
        return "" if mark_id is None else f"(<[{mark_id}]> /[a-zA-Z0-9]{{9}}/)? "

    def _several(self, call: str, between: str) -> str:
        return call if self.is_single else f"{call} ({between} {call}){{0,{MAX_CALLS - 1}}}"

    def _mark(self, text: str) -> str:
        return mark(text, self.find_token)


def mark(text: str, find_token: FindToken) -> str:
    """Return a mark as a token, or spelled out if the tokenizer has none.

    The library takes some tokens for special ones that are not, such as Qwen's `<tool_call>`, and
    does not allow them as text.
    """
    token_id = find_token(text)
    return quoted(text) if token_id is None else f"<[{token_id}]>"


def check_format(tool_format: ToolFormat, *, has_output: bool) -> None:
    """Check that a grammar can be made for calls in this format, beside output if there is any.

    Raises InvalidRequest if not.
    """
    if tool_format in (ToolFormat.LLAMA3, ToolFormat.PYTHONIC) and has_output:
        raise InvalidRequest(
            "this model writes tool calls without a mark, so they cannot be told from structured "
            "output; with structured output, 'tool_choice' must be 'none' or 'required'",
            "tool_choice",
        )


def _arguments(tool: OfferedTool) -> Part:
    if tool.parameters is None:
        return json_part({"type": "object", "additionalProperties": False}, tool.param)
    if tool.parameters.get("type", "object") != "object":
        raise InvalidRequest(f"{tool.param!r} must be of type 'object'", tool.param)
    return json_part(tool.parameters | {"type": "object"}, tool.param)
