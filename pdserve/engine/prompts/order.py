"""The order in which prompts are served: priority, fair share between classes, a policy's rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from pdserve.clock import Clock
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.fair_share import FairShare
from pdserve.engine.prompts.uncached import num_uncached
from pdserve.engine.request import Request, Scheduled

UNPROMISED_S = 30.0  # from receipt: when token 1 is due to those who were promised nothing


class Prompt(NamedTuple):
    """A prompt to be begun or continued, as it is at this moment."""

    request: Request
    num_uncached: int  # tokens to compute, if it is begun now
    batch: int = 0  # prompts share a step with those of the same number only


class PromptRule(ABC):
    """A policy's own order, among prompts of one priority and class. One small file each."""

    gives_way = True  # between chunks, a begun prompt to one that the rule puts first

    @abstractmethod
    def order(self, prompts: list[Prompt], now_s: float) -> list[Prompt]:
        """The same prompts, at least one, all of one class: first one first."""

    @abstractmethod
    def served(self, request: Request, seconds: float) -> None:
        """A step spends so much time on a prompt."""


class PromptOrder:
    """Who is served next.

    Priority comes first. In it, requests that have streamed already and lost their KV; then the
    class that got least of late; then the rule.
    """

    def __init__(self, rule: PromptRule, shares: FairShare, clock: Clock) -> None:
        self.rule = rule
        self._shares = shares
        self._clock = clock

    def sorted(self, requests: Iterable[Request], pool: BlockPool) -> list[Request]:
        """Waiting and half-done prompts, first one first."""
        return [prompt.request for prompt in self.prompts(requests, pool)]

    def prompts(self, requests: Iterable[Request], pool: BlockPool) -> list[Prompt]:
        """As `sorted`, with what the order went by."""
        gives_way = self.rule.gives_way
        peers: defaultdict[tuple[int, bool, str], list[Prompt]] = defaultdict(list)
        for request in requests:
            targets = request.targets
            is_ahead = bool(request.output_token_ids or (not gives_way and request.block_table))
            prompt = Prompt(request, num_uncached(request, pool))
            peers[targets.priority, is_ahead, targets.payer].append(prompt)
        now_s = self._clock.now()
        ordered: list[Prompt] = []
        for group in sorted(peers, key=self._rank):
            ordered += self.rule.order(peers[group], now_s)
        return ordered

    def charge(self, rows: Sequence[Scheduled], seconds: float) -> None:
        """A step that takes `seconds` computes these rows, which share its time by their tokens."""
        token_s = seconds / sum(row.num_tokens for row in rows)
        for row in rows:
            request, row_s = row.request, row.num_tokens * token_s
            self._shares.charge(request.targets.payer, request.targets.weight, row_s)
            if not request.is_decoding:
                self.rule.served(request, row_s)

    def _rank(self, group: tuple[int, bool, str]) -> tuple[int, bool, float]:
        priority, is_ahead, payer = group
        return (-priority, not is_ahead, self._shares.rank(payer))


def due_s(request: Request) -> float:
    """When its token 1 is due. For the unpromised that comes nearer too, so that none starves."""
    promised_s = request.targets.first_token_s
    return promised_s if promised_s < inf else request.lifecycle.received_s + UNPROMISED_S
