"""Request bodies for responses and conversations: the parameters that are supported.

`null` means the default for every parameter.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from coordinator.api.read.chat import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from coordinator.api.read.fields import (
    CallFields,
    Count,
    NumLogprobs,
    Penalty,
    Probability,
    RepetitionPenalty,
    StructuredOutputs,
    TokenId,
)

LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",  # without effect: reasoning is returned in plain text
]
MAX_NEW_ITEMS = 20  # items added to a conversation in one request


class ItemPart(Struct, kw_only=True):
    """A part of an item's text."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "refusal"]
    text: str | None = None
    refusal: str | None = None  # what was said, as text


ItemText = str | Annotated[list[ItemPart], Meta(max_length=MAX_PARTS)]


Role = Literal["user", "assistant", "system", "developer"]
ItemType = Literal[
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "compaction",
    "item_reference",
]


class InputItem(Struct, kw_only=True):
    """An item of the input; which fields it needs depends on its type."""

    type: ItemType | None = None
    id: str | None = None  # of a reference: the item it refers to; else this item's own id
    role: Role | None = None  # of a message
    content: ItemText | None = None  # of a message, or of reasoning
    call_id: str | None = None  # of a call, and of its output
    name: str | None = None  # of a call
    arguments: str | None = None  # of a call, in JSON
    output: ItemText | None = None  # of a call's output
    encrypted_content: str | None = None  # of a compaction; ignored for reasoning

    @property
    def kind(self) -> ItemType:
        """The item's type. Without one it is a message, or, with nothing but an id, a reference."""
        if self.type is None and self.role is None and self.content is None and self.id:
            return "item_reference"
        return self.type or "message"


MAX_ITEMS = MAX_MESSAGES - 1  # leaves room for the message of instructions
Input = str | Annotated[list[InputItem], Meta(max_length=MAX_ITEMS)]
# To be summarised; leaves room for the item that asks for the summary.
LongInput = str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_ITEMS - 1)]


class FunctionTool(Struct, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class FunctionChoice(Struct, kw_only=True, tag_field="type", tag="function"):
    """The function that must be called."""

    name: str


class AllowedChoice(Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """The functions that may be called, and whether one must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Meta(min_length=1, max_length=MAX_TOOLS)]


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice


class TextFormat(Struct, kw_only=True, omit_defaults=True, rename={"schema_": "schema"}):
    """The format of the text; all fields but `type` describe a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


Verbosity = Literal["low", "medium", "high"]


class TextConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the answer's text."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None  # a hint, as is the effort of reasoning


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of reasoning. There are no summaries: "auto" is accepted without effect.

    Which earlier reasoning the model is shown again is up to its chat template.
    """

    effort: Effort | None = None  # a hint, for chat templates that support it
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a streamed response."""

    include_obfuscation: bool | None = None  # padding against traffic analysis; without effect


MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)]


class CompactRequest(CallFields, kw_only=True):
    """The body of POST /v1/responses/compact."""

    model: str | None = None  # default: the served model
    input: LongInput | None = None
    instructions: str | None = None
    previous_response_id: str | None = None


class ConversationReference(Struct, kw_only=True):
    """A reference to a conversation by its id."""

    id: str


class ConversationRequest(Struct, kw_only=True):
    """The body of POST /v1/conversations."""

    items: Annotated[list[InputItem], Meta(max_length=MAX_NEW_ITEMS)] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(Struct, kw_only=True):
    """The body of POST /v1/conversations/{id}: the new metadata."""

    metadata: Metadata | None  # null: none


class NewItems(Struct, kw_only=True):
    """The body of POST /v1/conversations/{id}/items."""

    items: Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_NEW_ITEMS)]


class ResponseRequest(CallFields, kw_only=True):
    """The body of POST /v1/responses."""

    model: str | None = None  # default: the served model
    input: Input | None = None  # null or []: what is continued is answered as it is
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationReference | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None  # default: true
    metadata: Metadata | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[Includable] | None = None
    top_logprobs: NumLogprobs | None = None
    max_tool_calls: Count | None = None  # limits built-in tools, and there are none
    prompt_cache_key: str | None = None  # not needed to find cached prefixes
    safety_identifier: str | None = None
    user: str | None = None
    # Extensions, the same as in chat requests.
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
