"""The interface of decode policies: what to compute next, and which requests may join the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Policy, Queues


@dataclass(frozen=True, slots=True)
class StepPhase:
    """The policy (`pdserve.engine.scheduler.Policy`) of an engine for one of two phases."""

    planner: Callable[[Queues], list[Scheduled]]

    def plan(self, queues: Queues) -> list[Scheduled]:
        """As Policy.plan."""
        return self.planner(queues)


@runtime_checkable
class SideBySide(Protocol):
    """What a decode policy also has if it can plan both phases apart, for steps side by side."""

    def plan_decodes(self, queues: Queues) -> list[Scheduled]:
        """Return the next step's decodes."""
        ...

    def plan_prompts(self, queues: Queues) -> list[Scheduled]:
        """Return the next step's chunks of prompts."""
        ...


@runtime_checkable
class ChargesDrafts(Protocol):
    """What a decode policy also has if payers share its time."""

    def charge(self, request: Request, seconds: float) -> None:
        """Charge a request's payer for time that its drafts add to the step that was planned."""
        ...


@runtime_checkable
class DecodePolicy(Policy, Protocol):
    """Chooses what one step computes, and which requests may join the batch.

    Prompts to be prefilled here and requests to be handed off join by the same rule. The KV of the
    latter stays on the prefill node until there is a place for them: that is the back-pressure.
    """

    def has_place(self, members: Sequence[Request], newcomer: Request) -> bool:
        """Whether the newcomer may join these members (`Queues.beside`) by predicted step time.

        A request alone always may. Room for its KV is checked elsewhere (`Queues.reserve`).
        """
        ...

    def first(self, queues: Queues) -> Request | None:
        """Return the request that is to join next, or None if none waits.

        Candidates are prompts that wait here and claims of requests to be handed off. No other
        request may join before this one.
        """
        ...
