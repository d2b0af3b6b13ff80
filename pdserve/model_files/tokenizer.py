"""Loads a checkpoint's tokenizer files, for coordinators and nodes alike.

The coordinator encodes and decodes with the tokenizer, nodes match grammars over its vocabulary:
both must agree on which tokens are text and which are special.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from pdserve.model_files.gguf import tokenizer as gguf_tokenizer
from pdserve.model_files.gguf.model import open_gguf
from pdserve.model_files.git_lfs import refuse_pointer
from pdserve.shared.errors import TokenizerError

_OF_OTHERS = "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
# AutoTokenizer writes tekken.json as it is. mistral-common makes the chat template.
_OF_TEKKEN = (
    "from transformers.integrations.mistral import convert_tekken_tokenizer as of; "
    "of(folder + '/tekken.json').save_pretrained(folder) (pip install mistral-common)"
)
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """tokenizer_config.json, completed by the older special_tokens_map.json."""

    values: dict[str, Any] = field(default_factory=dict)
    tokens: Sequence[str] | None = None  # by id; None: only the tokenizer itself knows them

    @classmethod
    def load(cls, folder: Path) -> TokenizerConfig:
        """Read both files; either may be missing. Raises TokenizerError if one is malformed."""
        return cls(
            _load_json(folder / "special_tokens_map.json")
            | _load_json(folder / "tokenizer_config.json")
        )

    @property
    def named_special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token`, ...: the names that chat templates use."""
        named = {f"{name}_token": _content(self.values.get(f"{name}_token")) for name in _NAMED}
        return {name: token for name, token in named.items() if token is not None}

    @property
    def extra_special_tokens(self) -> list[str]:
        """Special tokens without such a name."""
        extra: list[str] = []
        for key in ("additional_special_tokens", "extra_special_tokens"):
            value = self.values.get(key) or []
            listed = list(value.values()) if isinstance(value, dict) else value
            if not isinstance(listed, list):
                raise TokenizerError(f"tokenizer_config.json: {key} is {value!r}, not a list")
            extra += [token for token in map(_content, listed) if token is not None]
        return extra

    @property
    def added_tokens(self) -> dict[int, dict[str, Any]]:
        """token id |-> the arguments of its `AddedToken`. Raises TokenizerError: it is no such."""
        added = self.values.get("added_tokens_decoder") or {}
        is_said = isinstance(added, dict) and all(
            token_id.isdecimal() and isinstance(flags, dict) for token_id, flags in added.items()
        )
        if not is_said:
            raise TokenizerError(
                "tokenizer_config.json: added_tokens_decoder must have an object for each id"
            )
        return {int(token_id): flags for token_id, flags in added.items()}

    @property
    def splits_special_tokens(self) -> bool:
        """Whether the text of a special token is encoded as plain text."""
        return bool(self.values.get("split_special_tokens", False))


def read_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, TokenizerConfig]:
    """The tokenizer of a checkpoint, and its config.

    Args:
        path: a folder, which has tokenizer.json; or a GGUF file.

    Raises:
        TokenizerError: there is none, or it cannot be used.
    """
    backend, config = _read_folder(path) if path.is_dir() else _read_gguf(path)
    prepare_backend(backend, config)
    return backend, config


def check_tokenizer(path: Path) -> None:
    """Check a checkpoint's tokenizer, of a GGUF file only what is known without making it.

    Raises:
        TokenizerError: there is none, or it cannot be used.
    """
    if path.is_dir():
        read_tokenizer(path)
    else:
        gguf_tokenizer.check_tokenizer(open_gguf(path))


def _read_gguf(path: Path) -> tuple[tokenizers.Tokenizer, TokenizerConfig]:
    backend, values, tokens = gguf_tokenizer.tokenizer_of(open_gguf(path))
    return backend, TokenizerConfig(values, tokens)


def _read_folder(folder: Path) -> tuple[tokenizers.Tokenizer, TokenizerConfig]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        is_tekken = (folder / "tekken.json").is_file()
        raise TokenizerError(
            f"{folder} has no tokenizer.json; convert its tokenizer once, e.g. with "
            f"{_OF_TEKKEN if is_tekken else _OF_OTHERS}"
        )
    return _parse(file), TokenizerConfig.load(folder)


def prepare_backend(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Apply the config's special tokens; turn truncation and padding off."""
    _mark_special_tokens(backend, config)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = config.splits_special_tokens


def _parse(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the bindings raise nothing more precise
        refuse_pointer(file)
        raise TokenizerError(f"{file} cannot be read: {error}") from error


def _mark_special_tokens(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Make the config's special tokens special, whatever tokenizer.json says.

    Names without an id stay unknown: a new id would be outside the model's embedding.
    """
    for token_id, flags in sorted(config.added_tokens.items()):
        token = _added(token_id, flags)
        known_id = backend.token_to_id(token.content)
        if known_id == token_id or (known_id is None and token_id == backend.get_vocab_size()):
            backend.add_tokens([token])
    names = [*config.named_special_tokens.values(), *config.extra_special_tokens]
    backend.add_special_tokens([name for name in names if backend.token_to_id(name) is not None])


def _added(token_id: int, flags: dict[str, Any]) -> tokenizers.AddedToken:
    try:
        return tokenizers.AddedToken(**flags)
    except (TypeError, ValueError) as error:
        raise TokenizerError(f"tokenizer_config.json: token {token_id} is {flags!r}") from error


def _content(token: object) -> str | None:
    """A special token is given as a string or as an object with its flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _load_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        refuse_pointer(path)
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return values
