"""Bodies of the Messages API: the parameters that are supported.

`null` means the default for every parameter. Marks for a prompt cache, names of accounts and hints
to other servers are accepted without effect: cached prefixes are found without them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from coordinator.api.read.chat import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from coordinator.api.read.fields import Probability


class BlockSource(Struct, kw_only=True):
    """Where the text of a document is; only text in the request itself is supported."""

    type: str
    data: str | None = None
    content: str | Annotated[list[GivenBlock], Meta(max_length=MAX_PARTS)] | None = None


class GivenBlock(Struct, kw_only=True):
    """A block of a message's content; which fields it needs depends on its type."""

    type: str
    text: str | None = None
    citations: dict[str, Any] | list[Any] | None = None  # of a document: only if they are off
    thinking: str | None = None
    signature: str | None = None  # of thinking
    id: str | None = None  # of a call
    name: str | None = None  # of a call
    input: dict[str, Any] | None = None  # of a call
    tool_use_id: str | None = None  # of a result: its call
    content: str | Annotated[list[GivenBlock], Meta(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None  # of a result
    source: str | BlockSource | None = None  # of a document, or of a search result
    title: str | None = None
    context: str | None = None


Blocks = Annotated[list[GivenBlock], Meta(max_length=MAX_PARTS)]


class GivenMessage(Struct, kw_only=True):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class ClientTool(Struct, kw_only=True):
    """A tool that the model may use, and the client carries out."""

    type: str | None = None  # only "custom": others are carried out by a server
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ClientToolChoice(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether a tool must be used, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model is to think first. The budget is a hint, and so is "adaptive"."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None  # nothing is summarised


class OutputFormat(Struct, kw_only=True, forbid_unknown_fields=True, rename={"schema_": "schema"}):
    """A JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any]


class OutputConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextEdit(Struct, kw_only=True):
    """An edit of the context; only those of thinking, which the chat template decides about."""

    type: Annotated[str, Meta(pattern="^clear_thinking_")]


class ContextManagement(Struct, kw_only=True, forbid_unknown_fields=True):
    """Edits of the context before it is answered."""

    edits: list[ContextEdit] | None = None


class PromptFields(Struct, kw_only=True):
    """What of a request decides the prompt."""

    model: str
    messages: Annotated[list[GivenMessage], Meta(min_length=1, max_length=MAX_MESSAGES - 1)]
    system: str | Blocks | None = None
    tools: Annotated[list[ClientTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ClientToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    # Without effect: of accounts, caches, and what else this server has but one kind of.
    cache_control: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: Literal["global"] | None = None
    mcp_servers: Annotated[list[Any], Meta(max_length=0)] | None = None
    speed: Literal["standard", "fast"] | None = None  # fast: the class of highest priority
    user_profile_id: str | None = None
    workspace_id: str | None = None


class CountRequest(PromptFields, kw_only=True):
    """The body of POST /v1/messages/count_tokens."""


class MessagesRequest(PromptFields, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)]  # 0: only the prompt is computed
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
