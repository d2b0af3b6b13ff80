"""The base of every config struct, and the units of settings."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, TypeVar

import msgspec
from msgspec import Meta

from pdserve.settings.flag_groups import Groups

# `extra` has the unit that docs/SETTINGS.md says.
MOST_SECONDS: Final = 1e6  # of any setting: timers and gRPC count in limited integers
Seconds = Annotated[float, Meta(gt=0, le=MOST_SECONDS, extra={"unit": "seconds"})]
Tokens = Annotated[int, Meta(ge=0, extra={"unit": "tokens"})]
Requests = Annotated[int, Meta(ge=1, extra={"unit": "requests"})]
Size = Annotated[str, Meta(extra={"unit": "bytes"})]  # read by `parse_bytes`
Port = Annotated[int, Meta(ge=0, le=65535)]
KvPort = Annotated[int, Meta(ge=0, le=65533)]  # the first of three
Count = Annotated[int, Meta(ge=1)]

C = TypeVar("C", bound="ConfigStruct")


class ConfigStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every config struct: immutable, keyword-only, and strict about unknown keys."""

    # The settings that are flags, in groups; None: all are, in a group for each section.
    flag_groups: ClassVar[Groups | None] = None

    def part(self, struct: type[C]) -> C:
        """The fields that `struct`, a process's part of these settings, has too."""
        names = struct.__struct_fields__
        return struct(**{name: getattr(self, name) for name in names})
