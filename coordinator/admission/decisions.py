"""The inputs and decisions of admission."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args

import msgspec

from pdserve.protocol import Slo
from pdserve.shared.errors import Overloaded

Reason: TypeAlias = Literal["ttft", "tpot", "inflight", "waiting"]
REASONS: tuple[Reason, ...] = get_args(Reason)


class PredictedTimes(Protocol):
    """Predictions for a request on the nodes it would run on; times in seconds, 0 = unknown."""

    @property
    def ttft_s(self) -> float:
        """Time until token 1, if the request is dispatched now."""
        ...

    @property
    def tpot_s(self) -> float:
        """Mean time per token after token 1."""
        ...

    @property
    def idle_ttft_s(self) -> float:
        """`ttft_s` if the nodes had nothing else to do."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        ...

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that have to be computed."""
        ...

    @property
    def output_tokens(self) -> int:
        """Expected output tokens."""
        ...

    @property
    def idle_tpot_s(self) -> float:
        """`tpot_s` if the nodes had nothing else to do."""
        ...


class Admit(msgspec.Struct, frozen=True):
    """Dispatch the request."""

    slo: Slo  # the promise that the nodes have to keep; none where the requested one is impossible


@dataclass(frozen=True, slots=True)
class Awaited:
    """Predictions for a request to a model that wakes first (`PredictedTimes`)."""

    wake_s: float  # until it has nodes
    is_ordered: bool  # else it wakes because requests wait
    queue_s: float  # prompts that go before
    prompt_s: float  # its own
    tpot_s: float = 0.0
    idle_tpot_s: float = 0.0
    prompt_tokens: int = 0
    uncached_tokens: int = 0
    output_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """As in PredictedTimes."""
        return self.idle_ttft_s + self.queue_s

    @property
    def idle_ttft_s(self) -> float:
        """The wake is in it: nobody else's work."""
        return self.wake_s + self.prompt_s


@dataclass(frozen=True, slots=True)
class Wait:
    """Keep the request in line: others leave too little slack now, or there are no nodes yet."""

    keeps_promise: bool = False  # it was made with the wake counted in


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse the request: it would miss its promise, or too many are in flight or waiting."""

    reason: Reason
    error: Overloaded


Decision: TypeAlias = Admit | Wait | Refuse
