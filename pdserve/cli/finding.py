"""What `pdserve doctor` finds out, one thing at a time."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Verdict(StrEnum):
    """Whether a thing is there."""

    OK = "ok"
    ABSENT = "absent"  # this machine, or this build, does without
    BROKEN = "broken"  # pdserve cannot work like this


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that pdserve uses or could use."""

    topic: str  # heading under which it is shown
    name: str
    verdict: Verdict
    detail: str
    needed_for: str = ""  # said when it is not there
