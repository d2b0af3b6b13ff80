"""Command-line flags derived from config structs, and configs read back from flags.

The field `kv_memory` of a struct is the flag `--kv-memory`. Its Meta description is the help text,
a Literal gives the choices, a list is given by repeating the flag or with commas (unless its Meta
has WHOLE), and a nested struct is a group of flags. Flags override `--config FILE.toml`, which
overrides the defaults.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from pdserve.config import WHOLE, ConfigStruct
from pdserve.config_file import load_config

C = TypeVar("C", bound=ConfigStruct)


@dataclass(frozen=True)
class Flag:
    """One flag of a config struct."""

    path: tuple[str, ...]  # from the outermost struct to the field
    hint: Any  # the field's type with its constraints
    description: str
    default: Any

    @property
    def option(self) -> str:
        """As typed: `--kv-memory`."""
        return "--" + self.path[-1].replace("_", "-")

    @property
    def dest(self) -> str:
        """Where argparse keeps the value."""
        return ".".join(self.path)

    @property
    def kind(self) -> Any:
        """The plain type: without constraints and without None."""
        return _plain(self.hint)

    @property
    def is_list(self) -> bool:
        """Whether the flag may be repeated."""
        return get_origin(self.kind) is list

    @property
    def is_whole(self) -> bool:
        """Whether commas belong to a list's values."""
        return any(meta.extra == WHOLE for meta in _metas(self.hint))


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser that reports an error in one line, and accepts no abbreviated flags."""

    def __init__(self, *positional: Any, **options: Any) -> None:
        super().__init__(*positional, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> Any:
        """Exit with code 2, which stands for a mistake of the user."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def flags_of(struct: type[ConfigStruct]) -> list[Flag]:
    """Every flag of `struct`, nested ones included, in the order of the fields.

    Raises:
        TypeError: two fields share a name, or a nested struct's default is not its plain one.
    """
    flags = list(_walk(struct, ()))
    names = [flag.option for flag in flags]
    if len(set(names)) < len(names):
        raise TypeError(f"{struct.__name__}: two fields would be the same flag: {sorted(names)}")
    return flags


def add_flags(parser: argparse.ArgumentParser, struct: type[ConfigStruct]) -> None:
    """Give `parser` the flags of `struct`, and `--config`."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE.toml", help="config file; flags override it"
    )
    groups: dict[tuple[str, ...], Any] = {(): parser}
    for flag in flags_of(struct):
        section = flag.path[:-1]
        if section not in groups:
            groups[section] = parser.add_argument_group(".".join(section))
        _add(groups[section], flag)


def config_from(struct: type[C], arguments: argparse.Namespace) -> C:
    """The config given by the parsed flags and, if one is named, the TOML file.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or value out of range; says which.
    """
    given = vars(arguments)
    overrides: dict[str, Any] = {}
    for flag in flags_of(struct):
        if flag.dest in given:
            section = overrides
            for name in flag.path[:-1]:
                section = section.setdefault(name, {})
            section[flag.path[-1]] = given[flag.dest]
    return load_config(struct, given.get("config"), overrides)


def as_flags(config: ConfigStruct) -> list[str]:
    """The flags from which `config_from` gives `config` again, without those at their defaults."""
    words = []
    for flag in flags_of(type(config)):
        value: Any = config
        for name in flag.path:
            value = getattr(value, name)
        if value == flag.default:
            continue
        if isinstance(value, bool):
            words.append(flag.option if value else "--no-" + flag.option.removeprefix("--"))
        elif flag.is_whole:
            words += [f"{flag.option}={text}" for text in value]
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words.append(f"{flag.option}={text}")
    return words


def _walk(struct: type[ConfigStruct], path: tuple[str, ...]) -> Iterator[Flag]:
    for field in msgspec.structs.fields(struct):
        kind = _plain(field.type)
        here = (*path, field.name)
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if isinstance(kind, type) and issubclass(kind, ConfigStruct):
            if default != kind():  # a partly given section would silently fall back to kind()
                raise TypeError(f"{'.'.join(here)}: the default must be {kind.__name__}()")
            yield from _walk(kind, here)
        else:
            yield Flag(here, field.type, _description(field.type), default)


def _plain(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        (inner,) = (kind for kind in get_args(hint) if kind is not NoneType)
        return _plain(inner)
    return hint


def _description(hint: Any) -> str:
    texts = [meta.description for meta in _metas(hint)]
    return next((text for text in reversed(texts) if text), "")


def _metas(hint: Any) -> list[msgspec.Meta]:
    metas = hint.__metadata__ if get_origin(hint) is Annotated else ()
    return [meta for meta in metas if isinstance(meta, msgspec.Meta)]


def _add(group: Any, flag: Flag) -> None:
    options: dict[str, Any] = {"dest": flag.dest, "default": argparse.SUPPRESS}
    options["help"] = _help(flag).replace("%", "%%")
    if flag.kind is bool:
        group.add_argument(flag.option, action=argparse.BooleanOptionalAction, **options)
        return
    choices = _choices(flag)
    options["metavar"] = "{" + ",".join(choices) + "}" if choices else _metavar(flag)
    options["type"] = _reader(flag)
    if flag.is_list:
        options["action"] = "extend"
    group.add_argument(flag.option, **options)


def _choices(flag: Flag) -> Sequence[str]:
    kind = get_args(flag.kind)[0] if flag.is_list else flag.kind
    return [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []


def _metavar(flag: Flag) -> str:
    last_word = flag.path[-1].rsplit("_", 1)[-1]
    return "SECONDS" if last_word == "s" else last_word.upper()


def _help(flag: Flag) -> str:
    if flag.default is None or flag.default == "" or flag.default == []:
        return flag.description
    if isinstance(flag.default, list):
        return f"{flag.description} (default: {','.join(map(str, flag.default))})"
    if isinstance(flag.default, bool):
        return f"{flag.description} (default: {'on' if flag.default else 'off'})"
    if isinstance(flag.default, float):
        return f"{flag.description} (default: {flag.default:g})"
    return f"{flag.description} (default: {flag.default})"


def _reader(flag: Flag) -> Callable[[str], Any]:
    """Text -> value. argparse puts the flag's name in front of the error's message."""
    hint = flag.kind if flag.is_list else flag.hint

    def read(text: str) -> Any:
        if flag.kind is str:
            return text
        words: Any = text
        if flag.is_list:
            words = [text] if flag.is_whole else [word.strip() for word in text.split(",")]
        try:
            return msgspec.convert(words, hint, strict=False)
        except msgspec.ValidationError as error:
            choices = _choices(flag)
            wanted = f"choose from {', '.join(choices)}" if choices else str(error)
            raise argparse.ArgumentTypeError(f'"{text}": {wanted}') from error

    return read
