"""Earliest deadline first, among prompts that can still meet their deadline."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from pdserve.engine.prompts.order import PromptRule, QueuedPrompt, due_s
from pdserve.engine.request import Request
from pdserve.lifecycle import Targets
from pdserve.measured.perf_model import PerfModel
from pdserve.rules.late import begin_by_s, go_on_by_s
from pdserve.shared.clock import Clock
from pdserve.shared.fair_share import FairShare

LATE_SHARE = 0.03  # share of a payer's time for late prompts while others can still be on time
OLDEST = Targets(payer="the oldest late one", weight=LATE_SHARE)
OTHERS = Targets(payer="all others", weight=1 - LATE_SHARE)
FEW = 64  # number of payers below which none is dropped
LONG_S = 60.0  # above that, payers without a prompt for this long are dropped


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
