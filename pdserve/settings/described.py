"""The settings of a config struct: names, types, defaults, descriptions.

The field `kv_memory` of the section `engine` is the setting `engine.kv_memory`: a key of the TOML
file and of `--set`, and the flag `--kv-memory` where it is shown as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from pdserve.settings.config import WHOLE
from pdserve.settings.struct import ConfigStruct


@dataclass(frozen=True)
class Setting:
    """One setting of a config struct."""

    path: tuple[str, ...]  # from the outermost struct to the field
    hint: Any  # the field's type with its constraints
    description: str
    default: Any

    @property
    def name(self) -> str:
        """As in the file: `engine.kv_memory`."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """What the flag is called, in words: no other setting of the struct has it."""
        flags = [meta.extra["flag"] for meta in self.metas if meta.extra and "flag" in meta.extra]
        return str(next(iter(flags), self.path[-1]))

    @property
    def option(self) -> str:
        """As typed: `--kv-memory`; a field named `from_` is `--from`, a word of Python."""
        return "--" + self.flag.rstrip("_").replace("_", "-")

    @property
    def kind(self) -> Any:
        """The plain type: without constraints and without None."""
        return _plain(self.hint)

    @property
    def is_list(self) -> bool:
        """Whether it may be given several times."""
        return get_origin(self.kind) is list

    @property
    def is_whole(self) -> bool:
        """Whether commas belong to a list's values."""
        return any(meta.extra == WHOLE for meta in _metas(self.hint))

    @property
    def choices(self) -> Sequence[str]:
        """The values that it, or each item of a list, can have; empty: not just a few."""
        kind = get_args(self.kind)[0] if self.is_list else self.kind
        return [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []

    @property
    def metas(self) -> list[msgspec.Meta]:
        """Its constraints, unit and description."""
        return _metas(self.hint)

    @property
    def unit(self) -> str:
        """What its number counts, such as "seconds"; empty if that goes without saying."""
        units = [
            str(meta.extra["unit"]) for meta in self.metas if meta.extra and "unit" in meta.extra
        ]
        return next(iter(units), "")

    def value(self, text: str) -> Any:
        """The value that a text stands for: a list with commas, unless it `is_whole`.

        Raises:
            msgspec.ValidationError: it has another type, or is out of range.
        """
        if self.kind is str:
            return text
        if not self.is_list:
            return msgspec.convert(text, self.hint, strict=False)
        words = [text] if self.is_whole else [word.strip() for word in text.split(",")]
        return msgspec.convert(words, self.kind, strict=False)

    def of(self, config: ConfigStruct) -> Any:
        """Its value in a config."""
        value: Any = config
        for name in self.path:
            value = getattr(value, name)
        return value


@cache
def settings_of(struct: type[ConfigStruct]) -> tuple[Setting, ...]:
    """Every setting of `struct`, those of sections included, in the order of the fields.

    Raises:
        TypeError: two fields share a name, or a nested struct's default is not its plain one.
    """
    settings = tuple(_walk(struct, ()))
    names = [setting.option for setting in settings]
    if len(set(names)) < len(names):
        raise TypeError(f"{struct.__name__}: two fields would be the same flag: {sorted(names)}")
    return settings


def _walk(struct: type[ConfigStruct], path: tuple[str, ...]) -> Iterator[Setting]:
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
            yield Setting(here, field.type, _description(field.type), default)


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
    if get_origin(hint) is Annotated:
        inner, *metas = get_args(hint)
        return _metas(inner) + [meta for meta in metas if isinstance(meta, msgspec.Meta)]
    if get_origin(hint) in (Union, UnionType):
        return [meta for kind in get_args(hint) for meta in _metas(kind)]
    return []
