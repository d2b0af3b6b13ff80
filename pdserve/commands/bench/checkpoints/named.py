"""The checkpoint that a benchmark measures: a named shape with random weights, or the user's."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pdserve.commands.bench.checkpoints.gguf_checkpoint import write_gguf
from pdserve.commands.bench.checkpoints.random_checkpoint import kept_checkpoint
from pdserve.commands.bench.checkpoints.shapes import SHAPES
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.user_cache import cache_folder


def gguf_of(checkpoint: str) -> str:
    """Return a checkpoint as a GGUF file, which is written beside it the first time.

    Raises:
        ConfigError: it cannot be written, or is no Llama in bfloat16.
    """
    folder = Path(checkpoint).resolve()
    file = folder.with_name(f"{folder.name}.gguf")
    try:
        if not file.exists():
            write_gguf(folder, file)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error}") from error
    return str(file)


def checkpoint_of(shape: str) -> str:
    """Return a checkpoint; that of a named shape is kept in the user's cache.

    Raises:
        ConfigError: there is no such shape, directory or GGUF file, or it cannot be written.
    """
    if shape not in SHAPES:
        if not Path(shape).exists():
            raise ConfigError(
                f'--shape "{shape}" is no directory, no GGUF file and none of {", ".join(SHAPES)}'
            )
        return shape
    folder = cache_folder("checkpoints") or Path(tempfile.gettempdir()) / "pdserve-checkpoints"
    try:
        return str(kept_checkpoint(folder, shape))
    except OSError as error:
        raise ConfigError(f"cannot write a checkpoint to {folder}: {error}") from error
