"""The time limit of a step with prompt chunks: streams lend time to the first prompt.

TPOT is a mean: one long gap does not break it, and a stream that is behind its schedule can catch
up. So the limit of a step is raised or lowered by the slack of its streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, inf
from typing import Final

from decode_node.policies.line import DecodeLine
from decode_node.policies.pace import Pace
from pdserve.engine.prompts.order import QueuedPrompt
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues
from pdserve.rules.batch import SAFETY

MIN_CHUNK: Final = 16  # tokens: a prompt that has begun progresses, whatever the TPOT targets


class LentTime:
    """Moves time between the streams of a node and the first of its prompts."""

    def __init__(self, pace: Pace, line: DecodeLine, token_budget: int) -> None:
        """
        Args:
            pace: predicted step times and promised latencies.
            line: which request yields to which.
            token_budget: most tokens of a step.
        """
        self._pace = pace
        self._line = line
        self._token_budget = token_budget

    def limit_s(
        self,
        prompts: Sequence[QueuedPrompt],
        usual_chunk: int,
        streams: Sequence[Request],
        limit_s: float,
        queues: Queues,
    ) -> float:
        """Return the time limit of a step with these streams.

        `limit_s` is the limit that their TPOT allows on average; within it, the first prompt would
        get `usual_chunk` tokens.

        If a payer floods the node, with prompts that wait and streams that run, a prompt of another
        payer progresses nearly as if it were alone: its steps may be as long as all streams can
        make up for. The flooding payer bears the cost: its own prompts leave time to the streams of
        other payers (`_of_flood_s`), however urgent these prompts are.
        """
        request = prompts[0].request
        if limit_s == inf or request.output_token_ids:
            return limit_s
        of_payers = {_payer(stream): stream for stream in streams}  # one stream of each payer
        waiting = {_payer(prompt.request) for prompt in prompts}
        if any(self._line.yields_to(of_payers[p], request) for p in waiting & of_payers.keys()):
            priority = request.targets.priority
            above = [r for r in streams if r.targets.priority > priority]
            stalled = [r for r in streams if r.targets.priority <= priority]
            bears_s = min(
                self._pace.longest_stall_s(stalled, queues), self._pace.step_limit_s(above, queues)
            )
            return max(limit_s, bears_s)
        others = {p for p, one in of_payers.items() if self._line.yields_to(request, one)}
        theirs = [stream for stream in streams if _payer(stream) in others]
        among_equals_s = self._among_equals_s(prompts, usual_chunk, streams, limit_s, queues)
        return min(among_equals_s, self._of_flood_s(streams, theirs, queues))

    def _of_flood_s(
        self, streams: Sequence[Request], theirs: Sequence[Request], queues: Queues
    ) -> float:
        """Return the limit for a prompt of a flood beside `theirs`, the streams of other payers.

        They lend it no time: it waits until they are back on schedule. Then it gets half of the
        time that they have to spare, until they are ahead by the longest possible step. So far
        ahead, they can lend the next prompt of their own payer all it needs. Streams that cannot
        catch up any more are ignored.
        """
        theirs = self._catching_up(theirs, queues)
        if not theirs:
            return inf
        spared_s = self._pace.tightest_s(theirs)
        longest_s = self._pace.perf.prefill_s(self._token_budget, 0, self._token_budget)
        if self._pace.least_in_hand_s(theirs) < longest_s:
            spared_s = (spared_s + self._pace.decode_s(streams)) / 2
        return min(spared_s, self._pace.least_in_hand_s(theirs))

    def _among_equals_s(
        self,
        prompts: Sequence[QueuedPrompt],
        usual_chunk: int,
        streams: Sequence[Request],
        limit_s: float,
        queues: Queues,
    ) -> float:
        """Return the limit where neither side yields to the other.

        Streams that are behind get steps without chunks as long as the prompts can wait. Streams
        that are ahead lend time to prompts that would be late at the usual pace. Nothing waits for
        a first prompt, or for streams, that can no longer meet their targets.
        """
        if self._pace.until_first_token_s(prompts[0].request) <= 0:
            return limit_s
        needed = self._most_needed(prompts, usual_chunk, limit_s)
        in_hand_s = self._pace.least_in_hand_s(streams)
        if needed > 1:
            return max(limit_s, SAFETY * in_hand_s)
        if needed > SAFETY or in_hand_s >= limit_s:
            return limit_s
        return min(limit_s, self._pace.least_in_hand_s(self._catching_up(streams, queues)))

    def _most_needed(
        self, prompts: Sequence[QueuedPrompt], usual_chunk: int, limit_s: float
    ) -> float:
        """Return the share of its time left that a prompt needs, of the one that needs most of it.

        At the usual pace, and with all before it: if the first waits, those behind it do, too. One
        that needs more than it has left counts, until it is due: more is asked than the node can
        do, so streams should have no more time than they need. (Without these, up to a quarter
        fewer of a co-located node's prompts were in time in simulated overloads.) Those of other
        payers do not count.
        """
        most, num_tokens, chunk = 0.0, 0, max(MIN_CHUNK, usual_chunk)
        for prompt in prompts:
            due_s = self._pace.until_first_token_s(prompt.request)
            if due_s <= 0 or most > 1 or _payer(prompt.request) != _payer(prompts[0].request):
                break
            num_tokens += prompt.num_uncached
            most = max(most, ceil(num_tokens / chunk) * limit_s / due_s)
        return most

    def _catching_up(self, streams: Iterable[Request], queues: Queues) -> list[Request]:
        """Return the streams that can still keep their TPOT."""
        remaining = queues.headroom.remaining
        return [r for r in streams if self._pace.catches_up(r, remaining(r))]


def _payer(request: Request) -> tuple[int, str]:
    return request.targets.priority, request.targets.payer
