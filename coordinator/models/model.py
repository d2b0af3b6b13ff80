"""A model as the API sees it: names, text, grammars, embeddings, and who generates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.generation import Generator
from coordinator.models.embedding import EmbeddingModel
from coordinator.models.fingerprint import Fingerprint
from coordinator.text import Tokenizer
from coordinator.text.grammars import GrammarChecker
from coordinator.text.parts import ToolFormat
from pdserve.errors import NoNodeAvailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model that clients may ask for."""

    names: tuple[str, ...]  # by which clients call it; the first is its own
    created: int  # seconds since 1970
    fingerprint: Fingerprint  # of its answers
    tokenizer: Tokenizer
    tool_format: ToolFormat | None  # in which it writes tool calls; None: not known
    grammars: GrammarChecker
    embedding: EmbeddingModel
    generator: Generator

    @property
    def name(self) -> str:
        """Its own name."""
        return self.names[0]

    def max_model_len(self) -> int:
        """Return the maximum number of tokens, prompt plus output, of a request.

        Raises NoNodeAvailable if no node has attached yet.
        """
        max_model_len = self.generator.max_model_len
        if max_model_len is None:
            raise NoNodeAvailable("no node has attached yet; try again later")
        return max_model_len

    async def close(self) -> None:
        """End its processes and threads."""
        await self.grammars.close()
        await self.tokenizer.close()


def make_model(
    generator: Generator,
    tokenizer: Tokenizer,
    names: Sequence[str],
    *,
    tool_format: ToolFormat | None = None,
    embedding: EmbeddingModel | None = None,
) -> Model:
    """Return the model of these names, its own first, that `generator` computes.

    `tool_format`: None: that of its chat template.
    """
    if not names:
        raise ValueError("the model needs a name")
    return Model(
        names=tuple(names),
        created=int(time.time()),
        fingerprint=Fingerprint(names[0]),
        tokenizer=tokenizer,
        tool_format=tool_format or tokenizer.tool_format,
        grammars=GrammarChecker(tokenizer),
        embedding=embedding or EmbeddingModel(),
        generator=generator,
    )
