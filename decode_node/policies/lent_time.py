"""How long a step may take for the sake of its first prompt: time that streams lend, and get back.

TPOT is a mean: one long gap does not break it, and what a stream is behind its schedule it can win
back. So the limit of a step moves by the time that streams have in hand, or lack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, inf
from typing import Final

from decode_node.policies.line import Line
from decode_node.policies.pace import Pace
from pdserve.engine.pace import SAFETY
from pdserve.engine.prompts.order import Prompt
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues

MIN_CHUNK: Final = 16  # tokens: a prompt that has begun gets on, whatever the decodes' promises are


class LentTime:
    """Between the streams of a node and the first of its prompts."""

    def __init__(self, pace: Pace, line: Line) -> None:
        """`pace` says what was promised, and `line` who yields to whom."""
        self._pace = pace
        self._line = line

    def limit_s(
        self,
        prompts: Sequence[Prompt],
        usual_chunk: int,
        streams: Sequence[Request],
        limit_s: float,
        queues: Queues,
    ) -> float:
        """Of a step with these streams; `limit_s` is what their promises allow on average, in which
        the first of the prompts would get `usual_chunk` tokens.

        Where prompts of a flood wait and its streams run, a prompt of others gets on nearly as if
        it were alone: for as long as all streams can make up for it. That is at the cost of the
        flood, whose prompts wait until the streams of others are back on schedule, however urgent
        they are themselves.
        """
        first, request = prompts[0], prompts[0].request
        if limit_s == inf or request.output_token_ids:
            return limit_s
        of_payers = {_payer(stream): stream for stream in streams}  # one of each
        waiting = {_payer(prompt.request) for prompt in prompts}
        if any(self._line.yields_to(of_payers[p], request) for p in waiting & of_payers.keys()):
            priority = request.targets.priority
            above = [r for r in streams if r.targets.priority > priority]
            stalled = [r for r in streams if r.targets.priority <= priority]
            bears_s = min(
                self._pace.longest_stall_s(stalled, queues), self._pace.step_limit_s(above, queues)
            )
            return max(limit_s, bears_s)
        flooded = {p for p, one in of_payers.items() if self._line.yields_to(request, one)}
        theirs = [stream for stream in streams if _payer(stream) in flooded]
        among_equals_s = self._among_equals_s(first, usual_chunk, streams, limit_s, queues)
        return min(among_equals_s, self._until_due_s(theirs, queues))

    def _among_equals_s(
        self,
        first: Prompt,
        usual_chunk: int,
        streams: Sequence[Request],
        limit_s: float,
        queues: Queues,
    ) -> float:
        """Streams that are behind get steps without chunks while the first prompt can wait for
        them, and those that are ahead lend time to a prompt that would be late at the usual pace.
        Nobody waits for who is late for good.
        """
        due_s = self._pace.until_first_token_s(first.request)
        if due_s <= 0:
            return limit_s
        num_steps = ceil(first.num_uncached / max(MIN_CHUNK, usual_chunk))
        needed_s, in_hand_s = num_steps * limit_s, self._pace.least_in_hand_s(streams)
        if needed_s > due_s:
            return max(limit_s, SAFETY * in_hand_s)
        if needed_s > SAFETY * due_s or in_hand_s >= limit_s:
            return limit_s
        return min(limit_s, self._until_due_s(streams, queues))

    def _until_due_s(self, streams: Iterable[Request], queues: Queues) -> float:
        """Until the next token of one of these is due, of those that are not late for good."""
        remaining = queues.headroom.estimate.remaining
        catching_up = [r for r in streams if self._pace.catches_up(r, remaining(r))]
        return self._pace.least_in_hand_s(catching_up)


def _payer(request: Request) -> tuple[int, str]:
    return request.targets.priority, request.targets.payer
