"""The answer of POST /v1/embeddings."""

from __future__ import annotations

from msgspec import Struct


class Embedding(Struct, kw_only=True):
    """The embedding of one input."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str  # a string is base64 of little-endian float32


class EmbeddingUsage(Struct):
    """Token counts of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, kw_only=True):
    """The embeddings of all inputs, in their order."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
