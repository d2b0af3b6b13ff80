"""`pdserve config`: prints the settings that a command would have, and where each comes from.

What it prints is a config file: given as `--config`, it makes the same settings again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pdserve.commands.cli.log import LOG_VARIABLE
from pdserve.settings.access import API_KEY_VARIABLE
from pdserve.settings.described import settings_of
from pdserve.settings.file import names_in, read_file
from pdserve.settings.flags import config_from, given_values
from pdserve.settings.struct import ConfigStruct
from pdserve.shared.process.exit_codes import OK
from pdserve.shared.process.user_cache import CACHE_VARIABLE, STATE_VARIABLE

ENVIRONMENT: Final[Mapping[str, str]] = {
    API_KEY_VARIABLE: "the key that a coordinator accepts and commands send",
    CACHE_VARIABLE: "directory of all caches, instead of ~/.cache",
    STATE_VARIABLE: "directory of all that is kept, instead of ~/.local/state",
    LOG_VARIABLE: "json: log lines are JSON objects",
}
_SECRET: Final = API_KEY_VARIABLE
_COLUMN = 44  # in which the origins begin, if what is before them is short


def run(command: str, struct: type[ConfigStruct], arguments: argparse.Namespace) -> int:
    """Print the settings of `pdserve COMMAND`; the exit code.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or value out of range; says which.
    """
    config = config_from(struct, arguments)
    print("\n".join(_lines(command, config, _origins(struct, arguments))))
    return OK


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # a string of JSON is one of TOML
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _origins(struct: type[ConfigStruct], arguments: argparse.Namespace) -> dict[str, str]:
    """Name of a setting |-> where its value comes from, for those that are not defaults."""
    path = arguments.config
    origins = dict.fromkeys(names_in(read_file(struct, path)), f"file {path}")
    return origins | dict.fromkeys(given_values(struct, arguments), "flag")


def _lines(command: str, config: ConfigStruct, origins: Mapping[str, str]) -> Iterator[str]:
    yield f"# pdserve {command}: every setting, and where it comes from"
    # In TOML, what is outside of sections comes first.
    section: tuple[str, ...] = ()
    for setting in sorted(settings_of(type(config)), key=lambda setting: len(setting.path) > 1):
        if setting.path[:-1] != section:
            section = setting.path[:-1]
            yield f"\n[{'.'.join(section)}]"
        value, name = setting.of(config), setting.path[-1]
        line = f"# {name} is not set" if value is None else f"{name} = {toml_value(value)}"
        yield f"{line:{_COLUMN}}# {origins.get(setting.name, 'default')}"
    yield "\n# environment"
    for name, meaning in ENVIRONMENT.items():
        value = os.environ.get(name)
        shown = "not set" if value is None else "set" if name == _SECRET else value
        yield f"{f'# {name}: {shown}':{_COLUMN}}# {meaning}"
