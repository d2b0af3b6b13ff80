"""The order in which prompts are served: priority, fair share between classes, a policy's rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from pdserve.clock import Clock
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.prompts.uncached import num_uncached
from pdserve.engine.request import Request, Scheduled
from pdserve.fair_share import FairShare
from pdserve.lifecycle import Targets

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
    payer that got least; then the rule.
    """

    def __init__(self, rule: PromptRule, shares: FairShare, clock: Clock) -> None:
        self.rule = rule
        self._shares = shares
        self._clock = clock
        self._wanting: list[Request] = []  # at the last step ...
        self._payers: list[Targets] = []  # ... and against whose shares, each once

    def sorted(self, requests: Iterable[Request], pool: BlockPool) -> list[Request]:
        """Waiting and half-done prompts, first one first."""
        return [prompt.request for prompt in self.prompts(requests, pool)]

    def prompts(self, requests: Iterable[Request], pool: BlockPool) -> list[Prompt]:
        """As `sorted`, with what the order went by."""
        peers: defaultdict[tuple[int, bool, str], list[Prompt]] = defaultdict(list)
        for request in requests:
            targets = request.targets
            is_ahead = self._is_ahead(request)
            prompt = Prompt(request, num_uncached(request, pool))
            peers[targets.priority, is_ahead, targets.payer].append(prompt)
        now_s = self._clock.now()
        ordered: list[Prompt] = []
        for group in sorted(peers.values(), key=self._rank):
            ordered += self.rule.order(group, now_s)
        return ordered

    def may_join(self, newcomer: Request, first: Request) -> bool:
        """Whether it may fill up a step that the other one is in, and make that longer."""
        return not self._shares.is_owed(first.targets) or self._shares.is_owed(newcomer.targets)

    def present(self, requests: list[Request]) -> None:
        """All who want something of the node, before they are put in order for a step."""
        if requests != self._wanting:  # they are the same for many steps
            self._wanting = requests
            there = {(r.targets.priority, r.targets.payer): r.targets for r in requests}
            self._payers = list(there.values())
        self._shares.present(self._payers)

    def charge(self, rows: Sequence[Scheduled], seconds: float) -> None:
        """A step that takes `seconds` computes these rows, which share its time by their tokens."""
        token_s = seconds / sum(row.num_tokens for row in rows)
        for row in rows:
            request, row_s = row.request, row.num_tokens * token_s
            self._shares.charge(request.targets, row_s)
            if not request.is_decoding:
                self.rule.served(request, row_s)

    def _rank(self, group: list[Prompt]) -> tuple[int, bool, float]:
        request = group[0].request
        targets = request.targets
        return (-targets.priority, not self._is_ahead(request), self._shares.rank(targets))

    def _is_ahead(self, request: Request) -> bool:
        """Whether it goes before fair shares: somebody reads its answer, or it is to be finished
        once it was begun."""
        has_begun = bool(request.block_table) and not self.rule.gives_way
        return bool(request.output_token_ids) or has_begun


def due_s(request: Request) -> float:
    """When its token 1 is due. For the unpromised that comes nearer too, so that none starves."""
    promised_s = request.targets.first_token_s
    return promised_s if promised_s < inf else request.lifecycle.received_s + UNPROMISED_S
