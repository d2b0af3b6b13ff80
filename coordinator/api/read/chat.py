"""The body of a chat: the parameters that are supported, and what can be said of them alone.

`null` means the default for every parameter. Known but unsupported parameters are in
`body.py`. The deprecated parameters for functions are `functions` and `function_call` instead
of `tools` and `tool_choice`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from coordinator.api.read.fields import Count, GenerationFields, NumLogprobs
from pdserve.shared.errors import InvalidRequest

MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_TOOLS = 128
MAX_CALLS = 128
MAX_DOCUMENTS = 4096


class ContentPart(Struct, kw_only=True):
    """A part of a message's content; only text and refusals, which are text, are supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Function(Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    """A tool that the model may use; only functions are supported."""

    type: Literal["function"]
    function: Function


class CalledFunction(Struct, kw_only=True):
    """A function that the model called."""

    name: str
    arguments: str  # JSON


class ToolCall(Struct, kw_only=True):
    """A tool call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class NamedFunction(Struct, kw_only=True):
    """A reference to a function by its name."""

    name: str


class NamedTool(Struct, kw_only=True, tag_field="type", tag="function"):
    """A reference to one of the tools."""

    function: NamedFunction


class AllowedTools(Struct, kw_only=True):
    """The tools that may be called, and whether one must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """A tool choice that restricts the tools to a subset."""

    allowed_tools: AllowedTools


class Message(Struct, kw_only=True):
    """One message of a conversation. Fields beyond these must be null or empty."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # newer name of reasoning_content in vLLM
    refusal: str | None = None
    function_call: CalledFunction | None = None  # deprecated form of tool_calls
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None


class Prediction(Struct, kw_only=True):
    """What the client expects to be answered: drafts, which change nothing but the time."""

    type: Literal["content"]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)]


class ChatRequest(GenerationFields, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_DOCUMENTS)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    verbosity: Literal["low", "medium", "high"] | None = None
    include_reasoning: bool | None = None  # False: reasoning is not returned, as in vLLM
    separate_reasoning: bool | None = None  # False: reasoning stays in the content, as in SGLang
    stream_reasoning: bool | None = None  # False: reasoning comes in one piece, as in SGLang
    echo: bool | None = None  # the answer begins with the message that it continues, as in vLLM
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], Meta(max_length=MAX_TOOLS)] | None = None  # deprecated
    function_call: Literal["none", "auto"] | NamedFunction | None = None  # deprecated

    @property
    def requested_tokens(self) -> int | None:
        """The most tokens of an answer; None: as many as fit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a tool call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def may_call(self, tool: Tool) -> bool:
        """Return whether the answer may call one of the tools."""
        choice = self.tool_choice
        return not isinstance(choice, NamedTool) or choice.function.name == tool.function.name


def checked(body: ChatRequest) -> ChatRequest:
    """Return a chat request as decoded in one form, checked as far as it can be without the model.

    It has `tools`, and a `tool_choice` among them: deprecated parameters are translated, and tools
    that may not be called are left out. Raises InvalidRequest, which names the parameter.
    """
    body = _with_functions_as_tools(body)
    _check_names(body)
    body = _with_allowed_tools(body)
    _check_choice(body)
    _check_logprobs(body)
    return body


def _with_functions_as_tools(body: ChatRequest) -> ChatRequest:
    """Return the request with functions as tools; `functions` is kept. Raises InvalidRequest."""
    chosen = body.function_call
    for name, value in (("tools", body.tools), ("tool_choice", body.tool_choice)):
        if value and (body.functions or chosen):
            ours = "functions" if body.functions else "function_call"
            raise InvalidRequest(f"{ours!r} and {name!r} cannot be combined", ours)
    names = [function.name for function in body.functions or []]
    if isinstance(chosen, NamedFunction) and chosen.name not in names:
        raise InvalidRequest(
            f"'function_call' names {chosen.name!r}, which is not one of 'functions'",
            "function_call",
        )
    if not body.functions:
        return body
    return structs.replace(
        body,
        tools=[Tool(type="function", function=function) for function in body.functions],
        tool_choice=NamedTool(function=chosen) if isinstance(chosen, NamedFunction) else chosen,
        parallel_tool_calls=False,
    )


def _check_names(body: ChatRequest) -> None:
    """Check that a call tells which tool it is of. Raises InvalidRequest."""
    named: dict[str, Tool] = {}
    for i, tool in enumerate(body.tools or []):
        name = tool.function.name
        if named.setdefault(name, tool) != tool:  # the same one twice is what frameworks may send
            where = f"functions[{i}].name" if body.functions else f"tools[{i}].function.name"
            raise InvalidRequest(f"{where!r} is {name!r}, which another tool has already", where)


def _with_allowed_tools(body: ChatRequest) -> ChatRequest:
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


def _check_choice(body: ChatRequest) -> None:
    """Check that there is a tool to call if one must be called. Raises InvalidRequest."""
    if not body.must_call:
        return
    chosen = body.tool_choice
    name = chosen.function.name if isinstance(chosen, NamedTool) else chosen
    if not body.tools:
        raise InvalidRequest(
            f"'tool_choice' is {name!r}, but the request has no 'tools'", "tool_choice"
        )
    if not any(body.may_call(tool) for tool in body.tools):
        raise InvalidRequest(
            f"'tool_choice' names {name!r}, which is not one of 'tools'", "tool_choice"
        )


def _check_logprobs(body: ChatRequest) -> None:
    """Check options about log-probabilities that depend on others. Raises InvalidRequest."""
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest(
            "'prompt_logprobs' cannot be combined with 'stream'", "prompt_logprobs"
        )
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true", "top_logprobs")
