"""Plans how an answer's text is split into content, reasoning and tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import structs

from coordinator.api.read.requests import AllowedToolChoice, ChatRequest, NamedTool, Tool
from coordinator.text import Tokenizer
from coordinator.text.grammars import CallGrammar, OfferedTool, Thinking
from coordinator.text.grammars.calls import MARKED, check_format
from coordinator.text.parts import AnswerParts, ToolFormat
from coordinator.text.parts.reasoning import BEGIN, END, Reasoning
from pdserve.errors import InvalidRequest

_LAST_TOKENS = 8  # tokens at a prompt's end that are searched for the reasoning mark
_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class PartsOptions:
    """Settings made by the operator, or derived from the model's chat template."""

    tool_format: ToolFormat | None = None
    splits_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class PartsPlan:
    """How the answers of one call are split into parts."""

    make: Callable[[], AnswerParts]  # makes the parser of one choice
    make_id: Callable[[], str]  # makes the id of a tool call
    kept_ids: frozenset[int]  # special tokens that mark tool calls
    thinking: Thinking | None  # reasoning that may precede structured output
    shows_reasoning: bool  # apart from the content
    shows_function_call: bool = False  # not tool calls: the request used the deprecated parameters


def with_allowed_tools(body: ChatRequest) -> ChatRequest:
    """Return the request without tools that `tool_choice` does not allow. Raises InvalidRequest."""
    if not isinstance(body.tool_choice, AllowedToolChoice):
        return body
    allowed = body.tool_choice.allowed_tools
    names = {tool.function.name for tool in allowed.tools}
    tools = [tool for tool in body.tools or [] if tool.function.name in names]
    if unknown := names.difference(tool.function.name for tool in tools):
        raise InvalidRequest(
            f"'tool_choice' allows {min(unknown)!r}, which is not one of 'tools'", "tool_choice"
        )
    return structs.replace(body, tools=tools, tool_choice=allowed.mode)


def check_tools(body: ChatRequest, tokenizer: Tokenizer, options: PartsOptions) -> None:
    """Check that the model supports the request's tools. Raises InvalidRequest."""
    template = tokenizer.chat_template
    if must_call(body) and not body.tools:
        raise InvalidRequest(
            f"'tool_choice' is {_choice(body)}, but the request has no 'tools'", "tool_choice"
        )
    if not body.tools or body.tool_choice == "none" or template is None:
        return
    if "tools" not in template.source:
        raise InvalidRequest("this model's chat template does not support tools", "tools")
    if options.tool_format is None:
        raise InvalidRequest(
            "the server does not recognise the form in which this model writes tool calls; whoever "
            "runs it can name the form with --tool-format",
            "tools",
        )


def plan_parts(
    body: ChatRequest, token_ids: Sequence[int], tokenizer: Tokenizer, options: PartsOptions
) -> PartsPlan:
    """Return the parts plan of a call whose prompt has been rendered to `token_ids`."""
    tool_format = options.tool_format if body.tools and body.tool_choice != "none" else None
    max_calls = 1 if body.parallel_tool_calls is False else None
    is_call = tool_format is not None and must_call(body)
    has_begun = options.splits_reasoning and _ends_with_mark(token_ids, tokenizer)

    is_apart = options.splits_reasoning and body.separate_reasoning is not False
    is_shown = body.include_reasoning is not False
    is_streamed = body.stream_reasoning is not False

    def make() -> AnswerParts:
        reasoning = Reasoning(has_begun, is_shown, is_streamed) if is_apart else None
        tools = tool_format.parser() if tool_format is not None else None
        return AnswerParts(reasoning, tools, max_calls, is_call)

    thinking = None
    if options.splits_reasoning and not body.continue_final_message:
        thinking = Thinking(has_begun, tokenizer.token_id(BEGIN), tokenizer.token_id(END))
    marks = tool_format.marks if tool_format is not None else ()
    kept = (tokenizer.special_id(mark) for mark in marks)
    is_mistral = tool_format is ToolFormat.MISTRAL
    return PartsPlan(
        make,
        _mistral_id if is_mistral else _id,
        frozenset(i for i in kept if i is not None),
        thinking,
        shows_reasoning=is_apart and is_shown,
        shows_function_call=bool(body.functions),
    )


def call_grammar(
    body: ChatRequest, tokenizer: Tokenizer, options: PartsOptions, *, has_output: bool
) -> CallGrammar | None:
    """Return the grammar of allowed tool calls; None: whether and how to call is up to the model.

    With structured output (`has_output`), an answer that calls no tool is that output. Otherwise it
    is any text; then only calls of strict functions are enforced. Raises InvalidRequest.
    """
    tool_format = options.tool_format
    if not body.tools or body.tool_choice == "none" or tool_format is None:
        return None
    is_free = not (must_call(body) or has_output)
    is_strict = any(tool.function.strict for tool in body.tools)
    if is_free and not (is_strict and tool_format in MARKED):
        return None
    check_format(tool_format, has_output=has_output)
    tools = [
        OfferedTool(
            tool.function.name,
            {} if is_free and not tool.function.strict else tool.function.parameters,
            f"tools[{i}].function.parameters",
        )
        for i, tool in enumerate(body.tools)
        if _may_be_called(tool, body)
    ]
    if not tools:
        raise InvalidRequest(
            f"'tool_choice' names {_choice(body)}, which is not one of 'tools'", "tool_choice"
        )
    is_single = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool)
    return CallGrammar(tool_format, tools, is_single, tokenizer.token_id, may_be_text=is_free)


def must_call(body: ChatRequest) -> bool:
    """Return whether the answer must be a tool call."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)


def _may_be_called(tool: Tool, body: ChatRequest) -> bool:
    choice = body.tool_choice
    return not isinstance(choice, NamedTool) or choice.function.name == tool.function.name


def _choice(body: ChatRequest) -> str:
    choice = body.tool_choice
    return repr(choice.function.name if isinstance(choice, NamedTool) else choice)


def _ends_with_mark(token_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    end = tokenizer.decode(token_ids[-_LAST_TOKENS:], skip_special_tokens=False)
    return end.rstrip().endswith(BEGIN)


def _id() -> str:
    return "call_" + secrets.token_hex(12)


def _mistral_id() -> str:
    """Return an id of nine letters and digits: Mistral's templates accept no other."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))
