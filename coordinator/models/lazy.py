"""A model whose tokenizer is loaded when it is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from coordinator.models.files import ModelFiles
from coordinator.models.model import ListedModel, Model, ReadText
from coordinator.models.scoring import ScoringModel
from coordinator.models.texts import Text, Texts
from coordinator.text.parts import ToolFormat
from pdserve.shared.errors import ModelError, TokenizerError


class TextSource:
    """Reads the text of one model, whenever it is not there."""

    def __init__(self, texts: Texts, files: ModelFiles, tool_format: ToolFormat | None) -> None:
        """`tool_format`: as the operator says; None: that of its chat template."""
        self._texts = texts
        self._files = files
        self._tool_format = tool_format
        self._scoring: ScoringModel | None = None  # once it was asked for

    async def get(self, until_s: float) -> ReadText:
        """Return it. Raises as `ListedModel.ready`."""
        files = self._files
        try:
            text = await self._texts.get(files.text, until_s)
        except ModelError as error:
            raise TokenizerError(
                f"{files.name!r} cannot be asked now: its tokenizer cannot be loaded, as the log "
                "of this server says"
            ) from error
        if self._scoring is None:
            self._scoring = _scoring(files, text)
            self._tool_format = self._tool_format or text.tokenizer.tool_format
        return ReadText(text, self._tool_format, self._scoring)

    async def close(self) -> None:
        """End the processes and threads of all that was loaded."""
        await self._texts.close()


def _scoring(files: ModelFiles, text: Text) -> ScoringModel:
    try:
        return files.scoring(text.tokenizer)
    except ModelError as error:
        return ScoringModel(refusal=error.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyModel(ListedModel):
    """One of several."""

    source: TextSource

    async def ready(self, until_s: float = math.inf) -> Model:
        """See ListedModel."""
        read = await self.source.get(until_s)
        shared = {field.name: getattr(self, field.name) for field in fields(ListedModel)}
        return Model(**shared, read=read)

    async def close(self) -> None:
        """See ListedModel."""
        await self.source.close()
