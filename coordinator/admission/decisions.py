"""What admission looks at, and what it can say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args

from pdserve.errors import Overloaded
from pdserve.protocol import Slo

Reason: TypeAlias = Literal["ttft", "tpot", "inflight", "waiting"]
REASONS: tuple[Reason, ...] = get_args(Reason)


class Predicted(Protocol):
    """What a request can expect of the nodes it would run on; seconds, 0 = not known."""

    @property
    def ttft_s(self) -> float:
        """Until token 1, if it is dispatched now."""
        ...

    @property
    def tpot_s(self) -> float:
        """Per further token, from when it arrives at the decode node."""
        ...

    @property
    def idle_ttft_s(self) -> float:
        """As `ttft_s`, if nothing else were there."""
        ...

    @property
    def uncached_tokens(self) -> int:
        """Of its prompt: to be computed."""
        ...

    @property
    def output_tokens(self) -> int:
        """Expected."""
        ...

    @property
    def idle_tpot_s(self) -> float:
        """As `tpot_s`, if nothing else were there."""
        ...


@dataclass(frozen=True, slots=True)
class Admit:
    """Dispatch it."""

    slo: Slo  # what the nodes are to keep: less than what was asked for, where that is hopeless


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now, and it has time."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Not now, and it cannot wait: a promise, or too many that are in flight or wait already."""

    reason: Reason
    error: Overloaded


Decision: TypeAlias = Admit | Wait | Refuse
