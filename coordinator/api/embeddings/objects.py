"""The answer of POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from coordinator.api.read.fields import CallFields, Count


class Embedding(Struct, kw_only=True):
    """The embedding of one input."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str  # a string is base64 of little-endian float32


class PromptUsage(Struct):
    """Token counts of all prompts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, kw_only=True):
    """The embeddings of all inputs, in their order."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: PromptUsage


MAX_INPUTS = 2048  # in one request, as in OpenAI's API

_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_SEVERAL = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS}
_INPUT = {"anyOf": [_TEXT, _IDS, _SEVERAL | {"items": _TEXT}, _SEVERAL | {"items": _IDS}]}


class EmbeddingRequest(CallFields, kw_only=True):
    """The body of POST /v1/embeddings. The input has the four forms of a completion's prompt."""

    model: str
    input: Annotated[Any, Meta(extra_json_schema=_INPUT)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    add_special_tokens: bool | None = None
