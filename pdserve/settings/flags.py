"""Command-line flags derived from config structs, and configs read back from flags.

The setting `engine.kv_memory` is the flag `--kv-memory`. Its Meta description is the help text, a
Literal gives the choices, and a list is given by repeating the flag or with commas (unless its Meta
has WHOLE). Settings that are no flags of a command (`flag_groups.py`) are given as `--set
SECTION.NAME=VALUE`. All this overrides `--config FILE.toml`, which overrides the defaults.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pdserve.settings.described import Setting, settings_of
from pdserve.settings.file import load_config
from pdserve.settings.struct import ConfigStruct
from pdserve.shared.hints.commands import command_instead, flag_instead, meant_setting
from pdserve.shared.hints.near import nearest

C = TypeVar("C", bound=ConfigStruct)


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser that reports an error in one line, and accepts no abbreviated flags."""

    def __init__(self, *positional: Any, **options: Any) -> None:
        super().__init__(*positional, **{"allow_abbrev": False, **options})
        self.no_flags: dict[str, Setting] = {}  # what would be the flag |-> a setting that is none
        self.commands: dict[str, FlagParser] = {}  # of this one: the first word chooses
        self.whole: Callable[[], FlagParser] = lambda: self  # all commands, of which this is one

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; a command or a flag that does not exist is refused with what is right instead.

        Here and not in `parse_args`, so that it is the command itself that refuses its flags.
        """
        words = list(sys.argv[1:] if args is None else args)
        command = words[0] if words else ""
        is_option = not command or command.startswith("-")
        if self.commands and command not in self.commands and not is_option:
            listed = [name for name, parser in self.commands.items() if parser.add_help]
            hint = command_instead(command, listed)
            self.error(f'there is no command "{command}": {hint}')
        namespace, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._refusal(unknown))
        return namespace, unknown

    @property
    def flags(self) -> list[str]:
        """Those that its help lists."""
        actions = self._option_string_actions.items()
        return [flag for flag, action in actions if action.help != argparse.SUPPRESS]

    def _refusal(self, unknown: list[str]) -> str:
        """Why these words are not understood, and what to write instead."""
        flag = next((word for word in unknown if word.startswith("-")), "")
        if not flag:
            is_model = "--model" in self._option_string_actions
            hint = f"; the model is named by --model {unknown[0]}" if is_model else ""
            return f'"{unknown[0]}" is not expected here{hint}'
        option, _, value = flag.partition("=")
        if not value:
            after = unknown[unknown.index(flag) + 1 :][:1]
            value = next((word for word in after if not word.startswith("-")), "VALUE")
        commands = self.whole().commands.values()
        owners = " and ".join(parser.prog for parser in commands if option in parser.flags)
        if setting := self.no_flags.get(option.replace("--no-", "--", 1)):
            value = "false" if setting.option != option else value
            told = f"is a flag of {owners}, but not here" if owners else "is no flag"
            return f"{option} {told}: use --set {setting.name}={value} or the file"
        if meant := meant_setting(option):
            own = "--" + meant.replace("_", "-")
            if own in self._option_string_actions:
                return f"there is no {option}: here it is {own}"
            if setting := self.no_flags.get(own):
                return f"there is no {option}: here it is the setting {setting.name} (--set)"
        if owners:
            return f"{option} is a flag of {owners}, not of {self.prog}"
        hint = flag_instead(option, [*self.flags, *self.no_flags])
        return f"there is no flag {option}" + (f": {hint}" if hint else "")

    def error(self, message: str) -> Any:
        """Exit with code 2, which stands for a mistake of the user."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def add_flags(parser: FlagParser, struct: type[ConfigStruct]) -> None:
    """Give `parser` the flags of `struct`, `--config`, and `--set` if not all settings are flags.

    Raises:
        TypeError: two fields of `struct` share a name.
    """
    parser.add_argument(
        "--config", type=Path, metavar="FILE.toml", help="config file; flags override it"
    )
    settings = {setting.flag: setting for setting in settings_of(struct)}
    groups = struct.flag_groups
    if groups is None:
        _add_by_section(parser, list(settings.values()))
        return
    shown = {name for names in groups.values() for name in names}
    hidden = [setting for name, setting in settings.items() if name not in shown]
    parser.add_argument(
        "--set",
        action=_SetAction,
        type=_assignment({setting.name: setting for setting in settings.values()}),
        metavar="NAME=VALUE",
        dest="assigned",
        default=argparse.SUPPRESS,
        help=f"any other setting: {_listed(hidden)} (docs/SETTINGS.md)",
    )
    for heading, names in groups.items():
        group = parser.add_argument_group(heading)
        for name in names:
            _add(group, settings[name])
    parser.no_flags |= {setting.option: setting for setting in hidden}


def _listed(settings: Sequence[Setting]) -> str:
    """Name settings without a section, and the sections of the others."""
    names = [setting.name for setting in settings]
    sections = sorted({name.partition(".")[0] for name in names if "." in name})
    own = [name for name in names if "." not in name]
    return ", ".join([*own, *(f"{section}.NAME" for section in sections)])


def given_values(struct: type[ConfigStruct], arguments: argparse.Namespace) -> dict[str, Any]:
    """Name of a setting |-> its value, for those that the command line gives."""
    given = vars(arguments)
    return {s.name: given[s.name] for s in settings_of(struct) if s.name in given}


def config_from(struct: type[C], arguments: argparse.Namespace) -> C:
    """The config given by the parsed flags and, if one is named, the TOML file.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or value out of range; says which.
    """
    overrides: dict[str, Any] = {}
    for name, value in given_values(struct, arguments).items():
        *sections, last = name.split(".")
        section = overrides
        for part in sections:
            section = section.setdefault(part, {})
        section[last] = value
    return load_config(struct, vars(arguments).get("config"), overrides)


def as_flags(config: ConfigStruct) -> list[str]:
    """The flags from which `config_from` gives `config` again, without those at their defaults."""
    groups = config.flag_groups
    shown = None if groups is None else {name for names in groups.values() for name in names}
    words = []
    for setting in settings_of(type(config)):
        value = setting.of(config)
        if value == setting.default:
            continue
        texts = value if setting.is_whole else [_text(value)]
        if shown is not None and setting.flag not in shown:
            words += [f"--set={setting.name}={text}" for text in texts]
        elif isinstance(value, bool):
            words.append(setting.option if value else setting.option.replace("--", "--no-", 1))
        else:
            words += [f"{setting.option}={text}" for text in texts]
    return words


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _add_by_section(parser: FlagParser, settings: Sequence[Setting]) -> None:
    groups: dict[tuple[str, ...], Any] = {(): parser}
    for setting in settings:
        section = setting.path[:-1]
        if section not in groups:
            groups[section] = parser.add_argument_group(".".join(section))
        _add(groups[section], setting)


def _add(group: Any, setting: Setting) -> None:
    options: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS}
    options["help"] = _help(setting).replace("%", "%%")
    if setting.kind is bool:
        group.add_argument(setting.option, action=argparse.BooleanOptionalAction, **options)
        return
    choices = setting.choices
    options["metavar"] = "{" + ",".join(choices) + "}" if choices else _metavar(setting)
    options["type"] = lambda text: _value(setting, text, text)
    if setting.is_list:
        options["action"] = "extend"
    group.add_argument(setting.option, **options)


def _metavar(setting: Setting) -> str:
    last_word = setting.path[-1].rsplit("_", 1)[-1]
    return "SECONDS" if last_word == "s" else last_word.upper()


def _help(setting: Setting) -> str:
    default = setting.default
    if default is None or default == "" or default == []:
        return setting.description
    if isinstance(default, bool):
        return f"{setting.description} (default: {'on' if default else 'off'})"
    if isinstance(default, float):
        return f"{setting.description} (default: {default:g})"
    return f"{setting.description} (default: {_text(default)})"


def _value(setting: Setting, text: str, word: str) -> Any:
    """What a text stands for. argparse puts the flag's name before an error about `word`."""
    try:
        return setting.value(text)
    except msgspec.ValidationError as error:
        choices = setting.choices
        wanted = f"choose from {', '.join(choices)}" if choices else str(error)
        raise argparse.ArgumentTypeError(f'"{word}": {wanted}') from error


def _assignment(settings: dict[str, Setting]) -> Callable[[str], tuple[Setting, Any]]:
    """`timeouts.drain_s=60` -> (setting, value)."""

    def read(text: str) -> tuple[Setting, Any]:
        name, is_assigned, value = text.partition("=")
        if name not in settings:
            hint = nearest(name, settings)
            raise argparse.ArgumentTypeError(f'"{text}": there is no setting `{name}`{hint}')
        if not is_assigned:
            raise argparse.ArgumentTypeError(f'"{text}": write it as {name}=VALUE')
        return settings[name], _value(settings[name], value, text)

    return read


class _SetAction(argparse.Action):
    """Keeps a value where the setting's own flag would; the last one counts, lists grow."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setting, value = values
        if setting.is_list:
            value = [*getattr(namespace, setting.name, []), *value]
        setattr(namespace, setting.name, value)
