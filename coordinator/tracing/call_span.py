"""The span of one call, from its W3C `traceparent`, and whether it is recorded.

traceparent: 00-<trace id, 32 hex digits>-<span id of the caller, 16>-<flags, 2>
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_INVALID_VERSION: Final = "ff"
_SAMPLED: Final = 1
_MOST_STATE: Final = 512  # characters of tracestate that are passed on


@dataclass(slots=True, eq=False)
class CallSpan:
    """A call that is recorded. Its id is known before it is made, for those that come under it."""

    trace_id: int
    span_id: int
    parent_id: int  # the caller's span; 0: it has none
    state: str = ""  # the caller's tracestate
    # How long its requests took in parts, by attribute, in seconds: the longest of them, if several
    latencies: dict[str, float] = field(default_factory=dict)

    @property
    def traceparent(self) -> str:
        """For what is done on behalf of this call elsewhere."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"


def begun(headers: Mapping[str, str], share: float) -> CallSpan | None:
    """Return the span of a call that has come with these headers; None: it is not sampled.

    A caller that is part of a trace has decided already. A `traceparent` that is malformed is as
    good as none, as the specification has it.
    """
    found = _FORM.fullmatch(headers.get(TRACEPARENT, ""))
    if found is None or not _is_valid(found):
        if random.random() >= share:
            return None
        return CallSpan(random.getrandbits(128) or 1, random.getrandbits(64) or 1, 0)
    _, trace_id, parent_id, flags, _ = found.groups()
    if not int(flags, 16) & _SAMPLED:
        return None
    state = headers.get(TRACESTATE, "")
    return CallSpan(
        int(trace_id, 16),
        random.getrandbits(64) or 1,
        int(parent_id, 16),
        state if len(state) <= _MOST_STATE else "",
    )


def _is_valid(found: re.Match[str]) -> bool:
    version, trace_id, parent_id, _, rest = found.groups()
    if version == _INVALID_VERSION or (version == "00" and rest):
        return False
    return int(trace_id, 16) != 0 and int(parent_id, 16) != 0
