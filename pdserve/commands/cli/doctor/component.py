"""One result of `pdserve doctor`."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Availability(StrEnum):
    """Whether a thing is available."""

    OK = "ok"
    ABSENT = "absent"  # optional, and not on this machine or in this build
    BROKEN = "broken"  # required: pdserve cannot work without it


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that pdserve uses or could use."""

    topic: str  # heading of its table
    name: str
    verdict: Availability
    detail: str
    needed_for: str = ""  # printed if it is not available
