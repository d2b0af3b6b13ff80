"""Bodies of the OpenAI API's requests, as far as they are served; ranges are checked on decoding.

`null` stands for the default everywhere. Parameters that are known but not served are in
`parameters.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=1, lt=2**31)]
Priority = Annotated[int, Meta(ge=-(2**30), le=2**30)]  # lower ones go first, as vLLM has it
MAX_MESSAGES = 16384
MAX_PARTS = 16384
MAX_CHOICES = 128  # of one prompt
NumLogprobs = Annotated[int, Meta(ge=0, le=20)]


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """How a stream is sent."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with every chunk, as vLLM has it
    include_obfuscation: bool | None = None  # padding against traffic analysis: not done


class JsonSchemaFormat(Struct, kw_only=True, rename={"schema_": "schema"}):
    """A schema that the answer is to be an instance of. It is enforced, strict or not."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the answer is to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


MAX_ANSWERS = 4096  # to choose from
AnswerList = Annotated[list[str], Meta(min_length=1, max_length=MAX_ANSWERS)]


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True, rename={"json_": "json"}):
    """vLLM's way to ask for structured output: one of these."""

    json_: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: AnswerList | None = None
    grammar: str | None = None


class CallFields(Struct, kw_only=True):
    """What every endpoint takes that has nodes work."""

    model: str
    service_tier: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    slo_class: str | None = None  # which of the cluster's service classes it is of
    priority: Priority | None = None


class GenerationFields(CallFields, kw_only=True):
    """What both generating endpoints take."""

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    response_format: ResponseFormat | None = None
    # Extensions, named as other servers name them.
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None  # 0 and -1 = off
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None  # these are its older names
    guided_regex: str | None = None
    guided_choice: AnswerList | None = None
    guided_grammar: str | None = None
    prompt_logprobs: NumLogprobs | None = None  # as vLLM has them


MAX_TOOLS = 128
MAX_CALLS = 128


class ContentPart(Struct, kw_only=True):
    """A piece of a message; only `type: text` is served."""

    type: str
    text: str | None = None


class Function(Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    """What a model may use: functions only."""

    type: Literal["function"]
    function: Function


class CalledFunction(Struct, kw_only=True):
    """A function that the model called."""

    name: str
    arguments: str  # JSON


class ToolCall(Struct, kw_only=True):
    """A call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class NamedFunction(Struct, kw_only=True):
    """A function by its name."""

    name: str


class NamedTool(Struct, kw_only=True, tag_field="type", tag="function"):
    """One of the tools."""

    function: NamedFunction


class AllowedTools(Struct, kw_only=True):
    """Those that may be called, and whether one must."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Some of the tools are as good as not there."""

    allowed_tools: AllowedTools


class Message(Struct, kw_only=True):
    """One message of a conversation. Fields beyond these must be null or empty."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = None


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_LISTS_OF_IDS = {"type": "array", "items": _IDS, "minItems": 1}
_PROMPT = {"anyOf": [{"type": "string"}, _TEXTS, _IDS, _LISTS_OF_IDS]}


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions. The prompt's four shapes are told apart in `prompts.py`."""

    prompt: Annotated[Any, Meta(extra_json_schema=_PROMPT)]
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None  # 0: the prompt is all


def field_names(schema: type[Struct]) -> frozenset[str]:
    """The fields of a request, by their JSON names."""
    return frozenset(schema.__struct_encode_fields__)
