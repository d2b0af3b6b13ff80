"""Request bodies of chat and text completions: the parameters that are supported.

`null` means the default for every parameter. Known but unsupported parameters are in
`parameters.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from coordinator.api.read.fields import MAX_CHOICES, Count, GenerationFields, NumLogprobs

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
    refusal: str | None = None
    function_call: CalledFunction | None = None  # deprecated form of tool_calls
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
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


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_LISTS_OF_IDS = {"type": "array", "items": _IDS, "minItems": 1}
_PROMPT = {"anyOf": [{"type": "string"}, _TEXTS, _IDS, _LISTS_OF_IDS]}


class CompletionRequest(GenerationFields, kw_only=True):
    """The body of POST /v1/completions. The prompt's four forms are described in `prompts.py`."""

    prompt: Annotated[Any, Meta(extra_json_schema=_PROMPT)]
    best_of: Annotated[int, Meta(ge=0, le=MAX_CHOICES)] | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None  # 0: no output
