"""First come, first served."""

from __future__ import annotations

from pdserve.engine.prompts.order import Prompt, PromptRule
from pdserve.engine.request import Request


class Arrival(PromptRule):
    """By receipt. A prompt that was begun is finished, unless a higher priority comes."""

    gives_way = False

    def order(self, prompts: list[Prompt], now_s: float) -> list[Prompt]:
        """Oldest first."""
        return sorted(prompts, key=lambda prompt: prompt.request.lifecycle.received_s)

    def served(self, request: Request, seconds: float) -> None:
        """Their order does not depend on it."""
