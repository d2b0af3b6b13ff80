"""What answers are made of, and where they are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pdserve.settings.struct import ConfigStruct

PoolingName = Literal["auto", "last", "mean", "cls"]
ScoringName = Literal["auto", "yes-no", "cosine"]
ToolFormatName = Literal[
    "auto", "harmony", "hermes", "llama3", "mistral", "pythonic", "qwen3_coder"
]


class AnswerConfig(ConfigStruct, frozen=True):
    """How answers are parsed and kept, and embeddings and scores are made."""

    tool_format: Annotated[
        ToolFormatName,
        Meta(description="how the model writes tool calls; auto: from its chat template"),
    ] = "auto"
    split_reasoning: Annotated[
        bool, Meta(description="return text between <think> and </think> as reasoning_content")
    ] = False
    pooling: Annotated[
        PoolingName,
        Meta(
            description="token states that embeddings are made of; auto: the checkpoint's, or last"
        ),
    ] = "auto"
    scoring: Annotated[
        ScoringName,
        Meta(
            description="how documents are scored: by yes or no to Qwen3-Reranker's prompt, or by "
            "cosine of embeddings; auto: as the checkpoint's modules say, or not at all"
        ),
    ] = "auto"
    store: Annotated[
        str,
        Meta(
            description="SQLite file of stored responses and conversations, or postgresql://USER@"
            "HOST/DATABASE for all coordinators; memory: none; empty: a file in the user's state "
            "directory, none with port 0"
        ),
    ] = ""
