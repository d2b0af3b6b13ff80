"""How a checkpoint's embeddings are made, as far as its files say.

A checkpoint made with sentence-transformers names its modules: how states are pooled and whether
the result is normalised. Any other is taken as a causal model whose last token has seen all: its
state is the embedding, normalised as OpenAI's are. config.json says whether a model was trained so
that the first few dimensions of its embeddings are embeddings, too (Matryoshka).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pdserve.checkpoint import Checkpoint, read_json
from pdserve.config import PoolingName
from pdserve.errors import InvalidRequest, ModelError
from pdserve.pooling import Pooling

_BY_NAME: Final = {"last": Pooling.LAST, "mean": Pooling.MEAN, "cls": Pooling.FIRST}
_BY_MODE: Final = {"lasttoken": Pooling.LAST, "mean": Pooling.MEAN, "cls": Pooling.FIRST}
_MODULES_FILE: Final = "modules.json"


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """What becomes of a prompt's final states."""

    pooling: Pooling = Pooling.LAST
    is_normalised: bool = True
    most_dimensions: int = 0  # that an embedding may be cut to; 0: the model does not allow it
    dimensions: tuple[int, ...] = ()  # ... and which; empty: any up to that
    refusal: str = ""  # why there are no embeddings of this model; empty: there are

    def check(self, dimensions: int | None) -> None:
        """Whether embeddings of so many dimensions can be had; None: all of them.

        Raises:
            InvalidRequest: no; says why.
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
        """[dimensions], or all: the embedding that is made of a `TokenEvent.embedding`."""
        vector = np.frombuffer(pooled, "<f4")[:dimensions].astype(np.float64)
        norm = np.linalg.norm(vector) if self.is_normalised else 1.0
        return (vector / (norm or 1.0)).astype("<f4")


def embedding_model(checkpoint: Checkpoint, pooling: PoolingName = "auto") -> EmbeddingModel:
    """Of a checkpoint; `pooling` is what an operator wants.

    Raises:
        ModelError: a file is not what it should be.
    """
    config = checkpoint.read_json("config.json") or {}
    most, dimensions = _dimensions(config)
    modules = _modules(checkpoint.path / _MODULES_FILE)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    found, refusal = Pooling.LAST, ""
    others = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    if others:
        refusal = f"this model makes its embeddings with {', '.join(others)}, which is not served"
    elif pooling != "auto":
        found = _BY_NAME[pooling]
    elif "Pooling" in kinds:
        folder = str(modules[kinds.index("Pooling")].get("path", ""))
        found, refusal = _pooling(checkpoint, folder)
    is_normalised = not modules or "Normalize" in kinds
    return EmbeddingModel(found, is_normalised, most, dimensions, refusal)


def _dimensions(config: dict[str, Any]) -> tuple[int, tuple[int, ...]]:
    """(The most that may be asked for, the ones that may be; none: all up to that)."""
    trained = config.get("matryoshka_dimensions") or []
    if not (trained or config.get("is_matryoshka")):
        return 0, ()
    most = config.get("hidden_size")
    if type(most) is not int or not isinstance(trained, list):
        raise ModelError("config.json: hidden_size must be a number, matryoshka_dimensions a list")
    if not all(type(one) is int and 0 < one <= most for one in trained):
        raise ModelError(f"config.json: matryoshka_dimensions must be numbers from 1 to {most}")
    return most, tuple(sorted(trained))


def _modules(file: Path) -> list[dict[str, Any]]:
    """Of sentence-transformers; none: it is no such checkpoint."""
    try:
        modules = json.loads(file.read_bytes())
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ModelError(f"{file} must hold a list of modules")
    return modules


def _pooling(checkpoint: Checkpoint, folder: str) -> tuple[Pooling, str]:
    """(How states are pooled, or why they cannot be)."""
    file = checkpoint.path / folder / "config.json"
    if not file.resolve().is_relative_to(checkpoint.path.resolve()):
        raise ModelError(f"{_MODULES_FILE} names a folder outside its directory: {folder}")
    config = read_json(file)
    if config is None:
        raise ModelError(f"{_MODULES_FILE} names {folder}/config.json, which is not there")
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
