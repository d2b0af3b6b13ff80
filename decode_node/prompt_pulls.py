"""Several answers to one prompt, decoded on one node: the prompt's KV is pulled once.

The first request pulls it. The others wait, and then find all full blocks in the prefix cache. They
pull only the last block, each into a block of its own, since each of them writes further KV there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pdserve.node.sessions.subscription import Subscription


@dataclass(slots=True)
class _Pull:
    """The first pull of a prompt."""

    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    was_adopted: bool = False


class PromptPulls:
    """The prompts whose KV is being pulled."""

    def __init__(self) -> None:
        self._pulls: dict[str, _Pull] = {}  # by prompt id

    def __contains__(self, prompt_id: str) -> bool:
        """Whether the prompt is being pulled already; other requests then wait for its end."""
        return prompt_id in self._pulls

    @asynccontextmanager
    async def turn(self, prompt_id: str, subscription: Subscription) -> AsyncIterator[None]:
        """Enter as the first request of the prompt, or once the first one has been adopted.

        If the first request fails, another one becomes the first. No request waits beyond the end
        of its handoff.

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
