"""Tokenizers of many models: equal files are one tokenizer, whose chats one process renders."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from coordinator.text import Tokenizer

_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)


class Tokenizers:
    """Those that were read so far. A tokenizer of a large vocabulary has a hundred megabytes."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int | None], Tokenizer] = {}

    def of(self, path: Path, num_ids: int | None, chat_template: str = "") -> Tokenizer:
        """Return a checkpoint's. Arguments and errors are those of `Tokenizer.from_checkpoint`."""
        key = _digest(path, chat_template), num_ids
        if key not in self._known:
            self._known[key] = Tokenizer.from_checkpoint(path, num_ids, chat_template)
        return self._known[key]


def _digest(path: Path, chat_template: str) -> bytes:
    """Return a digest of all that a tokenizer is read from; a GGUF file is like no other."""
    digest = hashlib.sha256(b"" if path.is_dir() else bytes(path.absolute()))
    for name, file in _files(path, chat_template):
        if file.is_file():
            content = file.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.digest()


def _files(path: Path, chat_template: str) -> Iterator[tuple[str, Path]]:
    for pattern in _FILES if path.is_dir() else ():
        yield from ((str(file.relative_to(path)), file) for file in sorted(path.glob(pattern)))
    if chat_template:
        yield "instead", Path(chat_template).expanduser()
