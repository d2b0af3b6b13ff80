"""The text-related files of a checkpoint folder, read but not yet interpreted."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.errors import TokenizerError

_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """tokenizer_config.json, completed by the older special_tokens_map.json."""

    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> TokenizerConfig:
        """Read both files; either may be missing. Raises TokenizerError when one is garbled."""
        return cls(
            _load_json(folder / "special_tokens_map.json")
            | _load_json(folder / "tokenizer_config.json")
        )

    @property
    def named_special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token`, ...: as chat templates know them."""
        named = {f"{name}_token": _content(self.values.get(f"{name}_token")) for name in _NAMED}
        return {name: token for name, token in named.items() if token is not None}

    @property
    def extra_special_tokens(self) -> list[str]:
        """Special tokens without a role of their own."""
        extra: list[str] = []
        for key in ("additional_special_tokens", "extra_special_tokens"):
            value = self.values.get(key) or []
            listed = list(value.values()) if isinstance(value, dict) else value
            extra += [token for token in map(_content, listed) if token is not None]
        return extra

    @property
    def added_tokens(self) -> dict[int, dict[str, Any]]:
        """token id |-> the flags under which it was added."""
        added: dict[str, dict[str, Any]] = self.values.get("added_tokens_decoder") or {}
        return {int(token_id): flags for token_id, flags in added.items()}

    @property
    def splits_special_tokens(self) -> bool:
        """Whether special tokens in a text count as plain text."""
        return bool(self.values.get("split_special_tokens", False))


def load_chat_template(folder: Path, config: TokenizerConfig) -> str | None:
    """The source of the default chat template; a file of its own goes before the config."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.values.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    named = {entry["name"]: entry["template"] for entry in template}
    if "default" not in named:
        raise TokenizerError(
            f"tokenizer_config.json names chat templates {sorted(named)}, but none is 'default'"
        )
    return str(named["default"])


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
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise TokenizerError(f"{path} should hold a JSON object")
    return values
