"""The order in which prompts are served, and how many of their tokens a step takes.

It is by priority, fair share and a policy's rule; the usual one, `DueWithSlack`, is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, Scheduled
from pdserve.lifecycle import Targets
from pdserve.measured.perf_model import PerfModel
from pdserve.protocol import StepCosts
from pdserve.rules.late import begin_by_s, go_on_by_s
from pdserve.shared.clock import Clock
from pdserve.shared.fair_share import FairShare

LATE_SHARE = 0.03  # share of a payer's time for late prompts while others can still be on time
OLDEST = Targets(payer="the oldest late one", weight=LATE_SHARE)
OTHERS = Targets(payer="all others", weight=1 - LATE_SHARE)
FEW = 64  # number of payers below which none is dropped
LONG_S = 60.0  # above that, payers without a prompt for this long are dropped


def num_uncached(request: Request, pool: BlockPool) -> int:
    """Return the number of tokens that are neither computed nor in the pool's prefix cache.

    This is called for every waiting prompt at every step, so the last match is kept and extended
    from its end, because hash chains are evicted from their ends. A gap further in would not be
    noticed, and the result would be too low until the end is evicted too. Admission matches again
    from the start.
    """
    if request.block_table:
        return request.num_uncomputed_tokens
    block_size = pool.block_size
    if request.matched_version != pool.cache_version:
        request.extend_hashes(request.num_tokens, block_size)
        hashes, num_matched = request.block_hashes, request.num_matched_blocks
        num_reusable = request.num_reusable_tokens // block_size
        if pool.snapshots is not None:
            hashes = hashes[: len(pool.usable(hashes[:num_reusable]))]
            num_matched, num_reusable = min(num_matched, len(hashes)), len(hashes)
        if num_matched and hashes[num_matched - 1] not in pool:
            num_matched = 0
        while num_matched < num_reusable and hashes[num_matched] in pool:
            num_matched += 1
        request.num_matched_blocks = num_matched
        request.matched_version = pool.cache_version
    return request.num_tokens - request.num_matched_blocks * block_size


UNPROMISED_S = 30.0  # time from receipt at which token 1 is due for requests without a TTFT target


class QueuedPrompt(NamedTuple):
    """A prompt to be started or continued, with its current state."""

    request: Request
    num_uncached: int  # tokens to compute if it is started now
    batch: int = 0  # only prompts with the same number may share a step


class PromptRule(ABC):
    """A policy's own order among prompts of one priority and payer. One small file per rule."""

    gives_way = True  # whether a started prompt yields between chunks to one that the rule prefers

    @abstractmethod
    def order(self, prompts: list[QueuedPrompt], now_s: float) -> list[QueuedPrompt]:
        """Sort prompts of one priority and payer, at least one; the first is served first."""

    @abstractmethod
    def served(self, request: Request, seconds: float) -> None:
        """Record that a step spends this much time on a prompt."""


class PromptOrder:
    """Decides which prompt is served next.

    The order is by priority; then requests that have output already, and lost their KV, go first;
    then the payer that asks for least per weight; then the rule decides.
    """

    def __init__(
        self,
        rule: PromptRule,
        shares: FairShare,
        perf: PerfModel,
        clock: Clock,
        token_budget: int,
    ) -> None:
        self.rule = rule
        self._shares = shares
        self._perf = perf
        self._clock = clock
        self._token_budget = token_budget
        self._wanting: list[Request] = []  # active requests at the last step ...
        self.payers: list[Targets] = []  # ... and their payers, without duplicates

    def sorted(self, requests: Iterable[Request], pool: BlockPool) -> list[Request]:
        """Return waiting and partly computed prompts in the order of service."""
        return [prompt.request for prompt in self.prompts(requests, pool)]

    def prompts(self, requests: Iterable[Request], pool: BlockPool) -> list[QueuedPrompt]:
        """Return the same as `sorted`, with the facts that the order is based on."""
        peers: defaultdict[tuple[int, bool, str], list[QueuedPrompt]] = defaultdict(list)
        for request in requests:
            targets = request.targets
            is_ahead = self._is_ahead(request)
            prompt = QueuedPrompt(request, num_uncached(request, pool))
            peers[targets.priority, is_ahead, targets.payer].append(prompt)
        now_s = self._clock.now()
        ordered: list[QueuedPrompt] = []
        for group in sorted(peers.values(), key=self._rank):
            ordered += self.rule.order(group, now_s)
        return ordered

    def may_join(self, newcomer: Request, first: Request) -> bool:
        """Whether `newcomer` may join the step that `first` is in, and so make it longer."""
        return not self._shares.is_owed(first.targets) or self._shares.is_owed(newcomer.targets)

    def present(self, requests: list[Request]) -> None:
        """Name all active requests of the node. Call this before sorting prompts for a step."""
        if requests != self._wanting:  # usually they are the same for many steps
            self._wanting = requests
            there = {(r.targets.priority, r.targets.payer): r.targets for r in requests}
            self.payers = list(there.values())
        self._shares.present(self.payers)

    def charge(self, rows: Sequence[Scheduled], seconds: float) -> None:
        """Charge a step of `seconds` to the payers of its rows, in proportion to their tokens."""
        token_s = seconds / sum(row.num_tokens for row in rows)
        for row in rows:
            request, row_s = row.request, row.num_tokens * token_s
            self._shares.charge(request.targets, row_s)
            if not request.is_decoding:
                self.rule.served(request, row_s)

    def _rank(self, group: list[QueuedPrompt]) -> tuple[int, bool, float]:
        request = group[0].request
        targets = request.targets
        rank = self._shares.rank(targets, self._waiting_s(group))
        return (-targets.priority, not self._is_ahead(request), rank)

    def _waiting_s(self, group: list[QueuedPrompt]) -> float:
        """Return the predicted time of these prompts in full steps, without their context.

        A prompt that has begun does not wait. So it puts its payer ahead until it is done: if
        equals took turns with every chunk, all would be late.
        """
        full_s = self._perf.prefill_s(self._token_budget, 0, self._token_budget)
        unbegun = [prompt for prompt in group if not prompt.request.block_table]
        num_tokens = sum([prompt.num_uncached for prompt in unbegun])
        return full_s * num_tokens / self._token_budget

    def _is_ahead(self, request: Request) -> bool:
        """Whether a request precedes fair sharing.

        It does if it has output already and did not lose its KV to another payer's share, or if it
        was started and the rule does not yield.
        """
        has_begun = bool(request.block_table) and not self.rule.gives_way
        return bool(request.output_token_ids and not request.gave_place) or has_begun


def due_s(request: Request) -> float:
    """Return when token 1 is due; `UNPROMISED_S` after receipt without a TTFT target.

    So a request without a target gets more urgent over time as well, and does not starve.
    """
    promised_s = request.targets.first_token_s
    return promised_s if promised_s < inf else request.lifecycle.received_s + UNPROMISED_S


CHUNK = 2  # times the saturating size: all later chunks read a chunk again, so it is not too small


@dataclass(slots=True)
class _Late:
    """The late prompts of one payer."""

    shares: FairShare = field(default_factory=lambda: FairShare(burst=0.0))
    oldest_id: str = ""  # request id of the oldest late prompt
    ordered_s: float = 0.0  # when the payer last had prompts


class DueWithSlack(PromptRule):
    """Slack: time until token 1 is due minus the predicted prefill time (Kairos, FlowPrefill).

    Prompts with negative slack can hardly be on time and go last, oldest first. In an overload,
    plain EDF would serve just these and make every prompt late; this rule serves the prompts that
    can still be on time. The oldest late prompt gets a small share of its payer's time
    nevertheless, so that each one completes eventually.

    The other prompts are ordered by due time, not by slack: a long prompt has little slack well
    before it is due, and would make short prompts late that are due earlier. Also, two prompts of
    about equal slack do not alternate with every chunk.

    Where no prompt of a payer has a promise, none of them is late: the oldest goes first.
    """

    def __init__(self, perf: PerfModel, token_budget: int, clock: Clock) -> None:
        self._perf = perf
        self._token_budget = token_budget
        self._clock = clock
        self._late: dict[tuple[int, str], _Late] = {}  # by priority and payer
        self._most_payers = FEW  # forget some when there are more

    def order(self, prompts: list[QueuedPrompt], now_s: float) -> list[QueuedPrompt]:
        """Return the prompts that can be on time, then the late ones; sometimes late ones first."""
        if all(prompt.request.targets.first_token_s == inf for prompt in prompts):
            return sorted(prompts, key=lambda prompt: due_s(prompt.request))
        timely: list[QueuedPrompt] = []
        late: list[QueuedPrompt] = []
        for prompt in prompts:
            (timely if self._slack_s(prompt, now_s) >= 0 else late).append(prompt)
        timely.sort(key=lambda prompt: due_s(prompt.request))
        late.sort(key=lambda prompt: prompt.request.lifecycle.received_s)
        of_payer = self._late_of(prompts[0].request)
        of_payer.oldest_id = late[0].request.request_id if late else ""
        of_payer.ordered_s = now_s
        if len(self._late) > self._most_payers:
            self._forget(now_s)
        of_payer.shares.present([OLDEST, OTHERS] if late and timely else [OTHERS])
        is_late_turn = of_payer.shares.rank(OLDEST) < of_payer.shares.rank(OTHERS)
        return late + timely if is_late_turn else timely + late

    def served(self, request: Request, seconds: float) -> None:
        """Charge the time to the oldest late prompt or to the others, to keep their shares."""
        of_payer = self._late_of(request)
        is_oldest = request.request_id == of_payer.oldest_id
        of_payer.shares.charge(OLDEST if is_oldest else OTHERS, seconds)

    def _late_of(self, request: Request) -> _Late:
        key = request.targets.priority, request.targets.payer
        late = self._late.get(key)
        if late is None:
            late = self._late[key] = _Late()
        return late

    def _forget(self, now_s: float) -> None:
        """Drop payers without recent prompts; for payers with prompts, each step calls `order`."""
        self._late = {
            payer: late for payer, late in self._late.items() if late.ordered_s > now_s - LONG_S
        }
        self._most_payers = 2 * len(self._late) + FEW

    def _slack_s(self, prompt: QueuedPrompt, now_s: float) -> float:
        num_cached = prompt.request.num_tokens - prompt.num_uncached
        time_s = self._perf.prefill_s(prompt.num_uncached, num_cached, self._token_budget)
        due = due_s(prompt.request)
        has_begun = bool(prompt.request.block_table)
        return (go_on_by_s(due, time_s) if has_begun else begin_by_s(due, time_s)) - now_s


class BatchSizes:
    """Token counts derived from the node's performance model and its config."""

    def __init__(
        self, perf: PerfModel, token_budget: int, prefill_chunk: int, *, gives_way: bool
    ) -> None:
        """
        Args:
            perf: the performance model; its costs may be replaced.
            token_budget: most tokens of a step.
            prefill_chunk: most tokens of a prompt in a step; 0: automatic.
            gives_way: whether a prompt gives way to others between chunks; if not, chunks are as
                large as possible.
        """
        self._perf = perf
        self._token_budget = token_budget
        self._prefill_chunk = prefill_chunk
        self._gives_way = gives_way
        self._costs: StepCosts | None = None  # that the sizes are for
        self._chunk = self._batch_tokens = 0

    @property
    def batch_tokens(self) -> int:
        """L_m: most tokens of several prompts in a step, no more than saturate the machine."""
        self._follow()
        return self._batch_tokens

    @property
    def chunk(self) -> int:
        """Most tokens of the first prompt in a step."""
        self._follow()
        return self._chunk

    def _follow(self) -> None:
        if self._costs is not self._perf.costs:
            self._measure()

    def _measure(self) -> None:
        self._costs = self._perf.costs
        saturating = self._perf.saturating_tokens(self._token_budget)
        wanted = self._prefill_chunk or (
            CHUNK * saturating if self._gives_way else self._token_budget
        )
        self._chunk = min(wanted, self._token_budget)
        self._batch_tokens = min(saturating, self._chunk)
