"""What a model's texts are read and written with: the files of its tokenizer and chat templates."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from coordinator.text import Tokenizer
from coordinator.text.checkpoint import load_chat_templates
from pdserve.model_files.git_lfs import refuse_pointer
from pdserve.model_files.tokenizer import TokenizerConfig, check_tokenizer
from pdserve.shared.errors import TokenizerError

log = logging.getLogger(__name__)

_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)

TextKey: TypeAlias = tuple[bytes, int | None]
"""What files of equal tokenizers have in common: their digest, and the number of ids."""


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Those of one model, which are looked at when it starts and loaded when it is asked for."""

    path: Path  # of its checkpoint
    num_ids: int | None  # the model's; None: as many as the tokenizer has
    chat_template: str  # a file instead of its own; empty: none
    digest: bytes  # of all of them

    @classmethod
    def of(cls, path: Path, num_ids: int | None, chat_template: str = "") -> TextFiles:
        """Look at a checkpoint's, which takes no second and no memory.

        Raises TokenizerError: one is missing, or is no JSON.
        """
        if path.is_dir():
            _check_json(path / "tokenizer.json")
            load_chat_templates(path, TokenizerConfig.load(path), chat_template)
        else:
            check_tokenizer(path)
        return cls(path, num_ids, chat_template, _digest(path, chat_template))

    @property
    def key(self) -> TextKey:
        """Equal for equal tokenizers."""
        return self.digest, self.num_ids

    def load(self) -> Tokenizer:
        """Load the tokenizer; of a large vocabulary that takes a second.

        Raises TokenizerError: it cannot be used, or the files are others by now.
        """
        if _digest(self.path, self.chat_template) != self.digest:
            raise TokenizerError(
                f"{self.path}: files of its tokenizer have changed since this process started: "
                "bring the old ones back, or start it again"
            )
        tokenizer = Tokenizer.from_checkpoint(self.path, self.num_ids, self.chat_template)
        check_vocabulary(tokenizer, self.path)
        return tokenizer


def check_vocabulary(tokenizer: Tokenizer, path: Path) -> None:
    """Raise TokenizerError if text can become tokens that the model does not have.

    Special tokens are only warned of: many models have one, for padding, that is never used.
    """
    num_ids = tokenizer.num_ids
    beyond = tokenizer.tokens_from(num_ids)
    text = [token_id for token_id in beyond if not tokenizer.is_special(token_id)]
    first = next(iter(text or beyond), None)
    if first is None:
        return
    said = (
        f"{path}: its tokenizer has tokens, such as {beyond[first]} ({first}), that the model with "
        f"its {num_ids} ids (vocab_size) lacks"
    )
    if text:
        raise TokenizerError(f"{said}; use the tokenizer that it was trained with")
    log.warning("%s; prompts with these special tokens will be refused", said)


class _Beginning(msgspec.Struct):
    """What every tokenizer.json has."""

    model: msgspec.Raw


def _check_json(file: Path) -> None:
    if not file.is_file():
        check_tokenizer(file.parent)  # says what to do
    try:
        msgspec.json.decode(file.read_bytes(), type=_Beginning)
    except OSError as error:
        raise TokenizerError(f"{file} cannot be read: {error}") from error
    except msgspec.DecodeError as error:
        refuse_pointer(file)
        raise TokenizerError(f"{file} cannot be read: {error}") from error


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
