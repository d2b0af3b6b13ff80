"""The grammar that a node keeps an answer to: structured output, tool calls, or both."""

from __future__ import annotations

from typing import Any

import msgspec

from coordinator.api.read.chat import ChatRequest, NamedTool
from coordinator.api.read.fields import GenerationFields, StructuredOutputs
from coordinator.api.read.json_text import JsonReader, check_exact
from coordinator.models.model import Model
from coordinator.text import Tokenizer
from coordinator.text.grammars import (
    AnswerGrammar,
    CallGrammar,
    Channels,
    OfferedTool,
    Output,
    OutputKind,
    Thinking,
)
from coordinator.text.grammars.calls import MARKED, check_format
from coordinator.text.parts import ToolFormat
from pdserve.grammar import MAX_GRAMMAR_CHARS
from pdserve.shared.errors import InvalidRequest

# Top-level request fields that are alternatives to fields of 'structured_outputs'.
_NAMES = {
    "guided_json": OutputKind.JSON,
    "guided_regex": OutputKind.REGEX,
    "guided_choice": OutputKind.CHOICE,
    "guided_grammar": OutputKind.LARK,
    "json_schema": OutputKind.JSON,
    "regex": OutputKind.REGEX,
    "ebnf": OutputKind.LARK,
}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


async def text_grammar(body: GenerationFields, model: Model, tenant: str) -> str:
    """Return the grammar of a text completion; "": any text. Raises InvalidRequest."""
    return await _checked(_wanted_output(body), None, None, model, tenant)


async def chat_grammar(
    body: ChatRequest,
    tool_format: ToolFormat | None,
    thinking: Thinking | Channels | None,
    model: Model,
    tenant: str,
) -> str:
    """Return the grammar of an answer to a chat; "": any text.

    `tool_format`: of the tools that may be called; None: there are none. `thinking` may precede
    what is constrained. Raises InvalidRequest when a constraint cannot be enforced.
    """
    output = _wanted_output(body)
    if body.must_call:
        output = None
    calls = None
    if tool_format is not None:
        calls = _call_grammar(body, tool_format, model.tokenizer, has_output=output is not None)
    return await _checked(output, calls, thinking, model, tenant)


def _call_grammar(
    body: ChatRequest, tool_format: ToolFormat, tokenizer: Tokenizer, *, has_output: bool
) -> CallGrammar | None:
    """Return the grammar of allowed tool calls; None: whether and how to call is up to the model.

    With structured output (`has_output`), an answer that calls no tool is that output. Otherwise it
    is any text; then only calls of strict functions are enforced. Raises InvalidRequest.
    """
    given = body.tools or []
    is_free = not (body.must_call or has_output)
    is_strict = any(tool.function.strict for tool in given)
    if is_free and not (is_strict and tool_format in MARKED):
        return None
    check_format(tool_format, has_output=has_output)
    tools = [
        OfferedTool(
            tool.function.name,
            {} if is_free and not tool.function.strict else tool.function.parameters,
            f"tools[{i}].function.parameters",
        )
        for i, tool in enumerate(given)
        if body.may_call(tool)
    ]
    is_single = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool)
    return CallGrammar(tool_format, tools, is_single, tokenizer.token_id, may_be_text=is_free)


async def _checked(
    output: Output | None,
    calls: CallGrammar | None,
    thinking: Thinking | Channels | None,
    model: Model,
    tenant: str,
) -> str:
    if output is None and calls is None:
        return ""
    _check_size(output, calls)
    param = "tools" if output is None else output.param
    answer = AnswerGrammar(output, calls, thinking)
    params = {} if calls is None else calls.params
    return await model.grammars.checked(answer.text, param, tenant, params)


def _check_size(output: Output | None, calls: CallGrammar | None) -> None:
    """Refuse input that is too large for any grammar before building one. Raises InvalidRequest."""
    sources = [] if output is None else [(output.value, output.param)]
    sources += [] if calls is None else [(tool.parameters, tool.param) for tool in calls.tools]
    num_chars = 0
    for value, param in sources:
        num_chars += len(msgspec.json.encode(value))
        if num_chars > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"with {param!r}, the constraints on the answer exceed {MAX_GRAMMAR_CHARS} "
                "characters as JSON; make them smaller",
                param,
            )


def _wanted_output(body: GenerationFields) -> Output | None:
    """Return the output constraint of a request, or None for free text.

    Raises InvalidRequest, also when more than one constraint is given.
    """
    wanted = [*_by_format(body), *_by_structured_outputs(body.structured_outputs)]
    wanted += [
        _output(kind, value, name)
        for name, kind in _NAMES.items()
        if (value := getattr(body, name)) is not None
    ]
    if len(wanted) > 1:
        params = " and ".join(repr(output.param) for output in wanted)
        raise InvalidRequest(f"{params} cannot be combined", wanted[1].param)
    return wanted[0] if wanted else None


def _by_format(body: GenerationFields) -> list[Output]:
    wanted = body.response_format
    if wanted is None:
        return []
    if wanted.schema_ is not None and wanted.type != "json_object":
        raise InvalidRequest(
            "'schema' belongs to 'response_format' of type 'json_object'; that of type "
            "'json_schema' is in 'json_schema.schema'",
            "response_format.schema",
        )
    if wanted.json_schema is not None and wanted.type != "json_schema":
        raise InvalidRequest(
            f"'json_schema' belongs to 'response_format' of that type, not of type {wanted.type!r}",
            "response_format.json_schema",
        )
    if wanted.type == "text":
        return []
    if wanted.type == "json_object":
        if wanted.schema_ is None:
            return [Output(OutputKind.JSON, _ANY_OBJECT, "response_format")]
        return [Output(OutputKind.JSON, _ANY_OBJECT | wanted.schema_, "response_format.schema")]
    if wanted.json_schema is None:
        raise InvalidRequest(
            "'response_format' of type 'json_schema' needs 'json_schema'",
            "response_format.json_schema",
        )
    param = "response_format.json_schema.schema"
    return [Output(OutputKind.JSON, wanted.json_schema.schema_, param)]


def _by_structured_outputs(wanted: StructuredOutputs | None) -> list[Output]:
    if wanted is None:
        return []
    given = {
        OutputKind.JSON: _ANY_OBJECT if wanted.json_object else wanted.json_,
        OutputKind.REGEX: wanted.regex,
        OutputKind.CHOICE: wanted.choice,
        OutputKind.LARK: wanted.grammar,
    }
    if wanted.json_object and wanted.json_ is not None:
        raise InvalidRequest("'json' and 'json_object' cannot be combined", "structured_outputs")
    outputs = [
        _output(kind, value, f"structured_outputs.{kind.value}")
        for kind, value in given.items()
        if value is not None
    ]
    if not outputs:
        raise InvalidRequest(
            "'structured_outputs' needs one of 'json', 'json_object', 'regex', 'choice' and "
            "'grammar'",
            "structured_outputs",
        )
    return outputs


def _output(kind: OutputKind, value: Any, param: str) -> Output:
    """Return the constraint; a JSON schema may be given as text. Raises InvalidRequest."""
    if kind is OutputKind.JSON and isinstance(value, str):
        text = value.encode()
        check_exact(text, param)
        value = JsonReader().read(text, repr(param), param)
        if not isinstance(value, dict | bool):
            raise InvalidRequest(
                f"{param!r} must be a JSON schema: an object, or true or false", param
            )
    return Output(kind, value, param)
