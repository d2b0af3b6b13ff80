"""The answer to an embedding request."""

from __future__ import annotations

from msgspec import Struct


class Embedding(Struct, kw_only=True):
    """Of one input."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str  # a string: float32, little-endian, in base64


class EmbeddingUsage(Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, kw_only=True):
    """Of all inputs, in their order."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
