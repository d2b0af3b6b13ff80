"""What a decode policy is asked, besides what to compute next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdserve.engine.request import Request
from pdserve.engine.scheduler import Policy, Queues


class DecodePolicy(Policy, Protocol):
    """Chooses what one step computes, and who may join the batch.

    Joining is asked of prompts to be prefilled here and of requests to be handed over, whose KV
    stays on the prefill node until there is a place for them: that is the back-pressure.
    """

    def has_place(self, members: Sequence[Request], newcomer: Request) -> bool:
        """Whether the newcomer may join these (`Queues.beside`), as far as time goes.

        A request alone always may. Room for its KV is another matter (`Queues.reserve`).
        """
        ...

    def first(self, queues: Queues) -> Request | None:
        """Who is to join next, of the prompts that wait here and the claims of those to be handed
        over; nobody goes past. None: nobody wants to."""
        ...
