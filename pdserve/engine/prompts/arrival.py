"""First come, first served."""

from __future__ import annotations

from pdserve.engine.prompts.order import Prompt, PromptRule
from pdserve.engine.request import Request


class Arrival(PromptRule):
    """Order by time of receipt. A started prompt is finished first, within its priority."""

    gives_way = False

    def order(self, prompts: list[Prompt], now_s: float) -> list[Prompt]:
        """Return the prompts oldest first."""
        return sorted(prompts, key=lambda prompt: prompt.request.lifecycle.received_s)

    def served(self, request: Request, seconds: float) -> None:
        """Do nothing: this order does not depend on past service."""
