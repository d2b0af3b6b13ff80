"""Several answers to one prompt, decoded on one node: its KV is pulled once.

Whoever comes first pulls it. The others wait, and then find all full blocks in the prefix cache:
what they pull is the last one, into a block of their own, since each of them goes on writing there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pdserve.node.subscription import Subscription


@dataclass(slots=True)
class _Pull:
    """A prompt's first one."""

    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    was_adopted: bool = False


class PromptPulls:
    """Prompts that are on their way."""

    def __init__(self) -> None:
        self._pulls: dict[str, _Pull] = {}  # by prompt id

    def __contains__(self, prompt_id: str) -> bool:
        """Whether somebody pulls it already: there is nothing to do for others before the end."""
        return prompt_id in self._pulls

    @asynccontextmanager
    async def turn(self, prompt_id: str, subscription: Subscription) -> AsyncIterator[None]:
        """To be the first, or to come when the first one's request has been adopted.

        If that one fails, somebody else is the first. Nobody waits beyond the end of a handoff.

        Raises:
            PdserveError: the handoff has ended; as Subscription.wait.
        """
        while (pull := self._pulls.get(prompt_id)) is not None:
            await subscription.wait(pull.is_over)
            if pull.was_adopted:
                yield
                return
        pull = self._pulls[prompt_id] = _Pull()
        try:
            yield
            pull.was_adopted = True
        finally:
            del self._pulls[prompt_id]
            pull.is_over.set()
