"""The base of every config struct."""

from __future__ import annotations

from typing import ClassVar, TypeVar

import msgspec

from pdserve.settings.flag_groups import Groups

C = TypeVar("C", bound="ConfigStruct")


class ConfigStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every config struct: immutable, keyword-only, and strict about unknown keys."""

    # The settings that are flags, in groups; None: all are, in a group for each section.
    flag_groups: ClassVar[Groups | None] = None

    def part(self, struct: type[C]) -> C:
        """The fields that `struct`, a process's part of these settings, has too."""
        names = struct.__struct_fields__
        return struct(**{name: getattr(self, name) for name in names})
