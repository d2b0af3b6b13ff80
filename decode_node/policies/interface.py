"""The interface of decode policies: what to compute next, and which requests may join the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from pdserve.engine.request import Request
from pdserve.engine.scheduler import Policy, Queues


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
