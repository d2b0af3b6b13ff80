"""Reading a config struct from a TOML file, with the settings of the command line on top."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from pdserve.settings.config import CoordinatorConfig, NodeConfig
from pdserve.settings.described import settings_of
from pdserve.settings.struct import ConfigStruct
from pdserve.shared.errors import ConfigError
from pdserve.shared.hints.near import nearest

_PROCESSES: Final[Mapping[str, type[ConfigStruct]]] = {
    "coordinator": CoordinatorConfig,
    "prefill and decode": NodeConfig,
}

C = TypeVar("C", bound=ConfigStruct)


def load_config(struct: type[C], path: Path | None, overrides: dict[str, Any]) -> C:
    """A config from an optional TOML file, with `overrides` (nested the same way) on top.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or value out of range; says which.
    """
    values = read_file(struct, path)
    try:
        return msgspec.convert(_merged(values, overrides), struct)
    except msgspec.ValidationError as error:
        raise ConfigError(_told(error, path)) from error


def _told(error: msgspec.ValidationError, path: Path | None) -> str:
    """What was wrong, behind the names of the file and of the setting, where these are known."""
    said, _, place = str(error).partition(" - at `$.")
    # What contradicts another setting was found by a section, and names both already.
    setting = "" if isinstance(error.__cause__, ValueError) else place.removesuffix("`")
    return ": ".join([*([str(path)] if path else []), *([setting] if setting else []), said])


def read_file(struct: type[ConfigStruct], path: Path | None) -> dict[str, Any]:
    """The tables of a TOML file, which has only settings of `struct`; none without a file.

    Raises:
        ConfigError: unreadable file, or unknown key; says which.
    """
    if path is None:
        return {}
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from error
    known = {setting.name for setting in settings_of(struct)}
    for name in names_in(values):
        if any(other.startswith(f"{name}.") for other in known):
            if not isinstance(values.get(name), dict):
                raise ConfigError(f"{path}: `{name}` is a section: write [{name}], and below it")
        elif name not in known:
            raise ConfigError(f"{path}: {_unknown(name, known)}")
    return values


def _unknown(name: str, known: Collection[str]) -> str:
    """Say that there is no such setting, and what is right instead."""
    told = f"there is no setting `{name}`"
    owners = [
        command
        for command, struct in _PROCESSES.items()
        if name in {setting.name for setting in settings_of(struct)}
    ]
    if owners:
        return f"{told} of this command: pdserve {', '.join(owners)} have it"
    section, _, last = name.rpartition(".")
    sections = sorted({other.rpartition(".")[0] for other in known} - {""})
    if not section or section in sections or last in {n.rpartition(".")[2] for n in known}:
        return told + nearest(name, known)
    hint = nearest(section, sections) or f", only {', '.join(sections)}"
    return f"{told}, since there is no section [{section}]{hint}"


def names_in(values: dict[str, Any], section: str = "") -> Iterator[str]:
    """The names of all values, with their sections; empty sections count as names."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from names_in(value, f"{section}{key}.")
        else:
            yield section + key


def _merged(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            merged[key] = _merged(below, value)
        else:
            merged[key] = value
    return merged
