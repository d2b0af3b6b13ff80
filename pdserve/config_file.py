"""Reading a config struct from a TOML file, with the flags that were given on top."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pdserve.config import ConfigStruct
from pdserve.errors import ConfigError

C = TypeVar("C", bound=ConfigStruct)


def load_config(struct: type[C], path: Path | None, overrides: dict[str, Any]) -> C:
    """A config from an optional TOML file, with `overrides` (nested the same way) on top.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or value out of range; says which.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read the config file {path}: {error}") from error
    try:
        return msgspec.convert(_merged(values, overrides), struct)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path or 'flags'}: {error}") from error


def _merged(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            merged[key] = _merged(below, value)
        else:
            merged[key] = value
    return merged
