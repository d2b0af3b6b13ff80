"""How embeddings are made from a checkpoint's final states, according to its files.

A sentence-transformers checkpoint lists its modules: how states are pooled and whether the result
is normalised. Any other checkpoint is treated as a causal model whose last token has attended to
the whole prompt: its state is the embedding, normalised like OpenAI's. config.json says whether the
model was trained so that the first dimensions of an embedding are an embedding, too (Matryoshka).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from coordinator.models.modules import Modules
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.model_files.gguf.config import architecture_of
from pdserve.model_files.gguf.fields import GgufFields
from pdserve.model_files.gguf.model import GgufModel
from pdserve.settings.answers import PoolingName
from pdserve.shared.errors import InvalidRequest, ModelError
from pdserve.shared.pooling import Pooling

_BY_NAME: Final = {"last": Pooling.LAST, "mean": Pooling.MEAN, "cls": Pooling.FIRST}
_BY_MODE: Final = {"lasttoken": Pooling.LAST, "mean": Pooling.MEAN, "cls": Pooling.FIRST}
_BY_GGUF: Final = {1: Pooling.MEAN, 2: Pooling.FIRST, 3: Pooling.LAST}  # by its pooling_type


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """How a prompt's final states become an embedding."""

    pooling: Pooling = Pooling.LAST
    is_normalised: bool = True
    most_dimensions: int = 0  # largest size that may be asked for; 0: cutting is not supported
    dimensions: tuple[int, ...] = ()  # sizes that may be asked for; empty: any up to the largest
    refusal: str = ""  # why this model has no embeddings; empty: it has
    is_declared: bool = False  # its files, or its operator, say that it is for embeddings

    def check(self, dimensions: int | None) -> None:
        """Check that embeddings of this many dimensions are available; None means all dimensions.

        Raises:
            InvalidRequest: they are not; says why.
        """
        if self.refusal:
            raise InvalidRequest(self.refusal, "model")
        if dimensions is None:
            return
        if not self.most_dimensions:
            raise InvalidRequest(
                "'dimensions' is not supported: this model was not trained for embeddings that are "
                "cut short (Matryoshka)",
                "dimensions",
            )
        if dimensions > self.most_dimensions:
            raise InvalidRequest(
                f"'dimensions' is {dimensions}, but embeddings have {self.most_dimensions}",
                "dimensions",
            )
        if self.dimensions and dimensions not in self.dimensions:
            raise InvalidRequest(
                f"'dimensions' is {dimensions}, but this model was trained for "
                f"{', '.join(map(str, self.dimensions))}",
                "dimensions",
            )

    def finished(self, pooled: bytes, dimensions: int | None) -> npt.NDArray[np.float32]:
        """Return the embedding [dimensions or all] made from a `TokenEvent.embedding`."""
        vector = np.frombuffer(pooled, "<f4")[:dimensions].astype(np.float64)
        norm = np.linalg.norm(vector) if self.is_normalised else 1.0
        return (vector / (norm or 1.0)).astype("<f4")

    def direction(self, pooled: bytes) -> npt.NDArray[np.float64]:
        """Return the embedding with length 1: [dimensions]; products of two are cosines."""
        vector = np.frombuffer(pooled, "<f4").astype(np.float64)
        return vector / (np.linalg.norm(vector) or 1.0)


def embedding_model(checkpoint: Checkpoint, pooling: PoolingName = "auto") -> EmbeddingModel:
    """Read a checkpoint's embedding model; `pooling` is the operator's choice.

    Raises:
        ModelError: a file is invalid.
    """
    config = checkpoint.read_json("config.json") or {}
    most, dimensions = _dimensions(config)
    modules = Modules.of(checkpoint)
    kinds = modules.kinds
    found, refusal = Pooling.LAST, ""
    others = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    if others:
        refusal = f"this model makes its embeddings with {', '.join(others)}, which is not served"
    elif pooling != "auto":
        found = _BY_NAME[pooling]
    elif "Pooling" in kinds:
        found, refusal = _pooling(modules.config("Pooling"))
    elif (file := checkpoint.gguf) is not None:
        found, refusal = _gguf_pooling(file)
    is_normalised = not kinds or "Normalize" in kinds
    is_declared = pooling != "auto" or "Pooling" in kinds or _has_gguf_pooling(checkpoint.gguf)
    return EmbeddingModel(found, is_normalised, most, dimensions, refusal, is_declared)


def _gguf_kind(file: GgufModel) -> int:
    """A GGUF file's pooling_type; 0, or without the key: it is no embedding model."""
    fields = GgufFields(file.values, file.path, f"{architecture_of(file)}.")
    return fields.integer("pooling_type", 0, minimum=0)


def _has_gguf_pooling(file: GgufModel | None) -> bool:
    return file is not None and _gguf_kind(file) in _BY_GGUF


def _gguf_pooling(file: GgufModel) -> tuple[Pooling, str]:
    """As _pooling, of a GGUF file."""
    kind = _gguf_kind(file)
    if kind == 0 or kind in _BY_GGUF:
        return _BY_GGUF.get(kind, Pooling.LAST), ""
    return Pooling.LAST, (
        f"this model's pooling_type is {kind}; only 1 (mean), 2 (cls) and 3 (last) are served"
    )


def _dimensions(config: dict[str, Any]) -> tuple[int, tuple[int, ...]]:
    """Return (most dimensions, dimensions that may be asked for; empty: any up to the most)."""
    trained = config.get("matryoshka_dimensions") or []
    if not (trained or config.get("is_matryoshka")):
        return 0, ()
    most = config.get("hidden_size")
    if type(most) is not int or not isinstance(trained, list):
        raise ModelError("config.json: hidden_size must be a number, matryoshka_dimensions a list")
    if not all(type(one) is int and 0 < one <= most for one in trained):
        raise ModelError(f"config.json: matryoshka_dimensions must be numbers from 1 to {most}")
    return most, tuple(sorted(trained))


def _pooling(config: dict[str, Any]) -> tuple[Pooling, str]:
    """Return (pooling, refusal); a refusal says why the model's pooling is not served."""
    prefix, suffix = "pooling_mode_", "_tokens"
    modes = [
        key.removeprefix(prefix).removesuffix(suffix).removesuffix("_token")
        for key, is_on in config.items()
        if key.startswith(prefix) and is_on is True
    ] or [str(config.get("pooling_mode", "none"))]
    if len(modes) == 1 and modes[0] in _BY_MODE:
        return _BY_MODE[modes[0]], ""
    return Pooling.LAST, (
        f"this model pools by {' and '.join(modes)}; only {', '.join(_BY_MODE)} are served"
    )
