"""What becomes of a request that one node does alone, and of the others there.

Its prompt is computed beside streams. Each step with a chunk in it makes them wait; and while the
request streams itself, prompts of others get less of each step. Who places a request where it is
best for the request alone makes it worse for all, so both are counted (`harm`).
"""

from __future__ import annotations

import numpy as np

from coordinator.routing.decode_load import Batch
from coordinator.routing.local_chunks import LocalChunks, Progress
from coordinator.routing.outlook import NO_PLACE_S, Outlook, Times
from coordinator.routing.sides import SAFETY, USUAL_TPOT_S, USUAL_TTFT_S
from coordinator.routing.slots import Floats, Ints
from coordinator.routing.waiting import has_place, pace_s


class OneNode:
    """At each of a few nodes; arrays are in the order of `slots`."""

    def __init__(self, outlook: Outlook, slots: Ints) -> None:
        self.slots = slots
        self._outlook = outlook
        fleet, now_s, newcomer = outlook.fleet, outlook.now_s, outlook.newcomer
        slo = outlook.request.slo
        progress = Progress(fleet, outlook.decodes, slots, SAFETY * slo.tpot_s, now_s)
        queue_s, prompt_s = outlook.queue_s[slots], outlook.prompt_s[slots]
        begins_s, ends_s = progress.takes_s(np.array([queue_s, queue_s + prompt_s]))
        self.begins_s: Floats = begins_s
        then = progress.at(self.begins_s)
        chunks = progress.chunks
        step_s, rows = chunks.step_s[then], chunks.rows[then]
        # A step at least, however small the prompt.
        first_s = np.minimum(step_s, prompt_s + chunks.without_s(then))
        self.ttft_s: Floats = np.maximum(ends_s, begins_s + first_s)
        batch = outlook.decodes.at_slots(now_s, now_s + self.ttft_s, slots)
        with_it_s = pace_s(fleet, slots, batch, newcomer)
        self._is_full = ~has_place(fleet, slots, batch, newcomer, with_it_s)
        stall_s = np.maximum(step_s - with_it_s, 0.0) * (rows > 0)
        # Steps with chunks, ours and those before us, among the steps of a stream's life.
        share = np.minimum(self.ttft_s / step_s / outlook.output_tokens, 1.0)
        self._stalled_s: Floats = share * stall_s
        self.tpot_s: Floats = with_it_s + self._stalled_s
        # Added to the TPOTs of all streams.
        self.num_steps: Floats = prompt_s / chunks.alone_s[then]  # that it takes part in
        stalls_s = rows * stall_s * self.num_steps / outlook.output_tokens
        self.harm: Floats = stalls_s / (slo.tpot_s or USUAL_TPOT_S)
        num_prompts = outlook.queues.num_prompts[slots]
        if num_prompts.any():
            # Of each step this stream takes its part, which prompts lose: the first stream takes
            # most. Of a queue that is longer than the promise, the end is late in any case.
            with_it = Batch(rows + 1, chunks.context[then] + newcomer.context)
            slower = LocalChunks(fleet, slots, with_it, SAFETY * slo.tpot_s)
            lost = np.maximum(chunks.speed[then] - slower.speed, 0.0)
            lost_s = lost * outlook.output_tokens * np.maximum(with_it_s, SAFETY * slo.tpot_s)
            promised_s = slo.ttft_s or USUAL_TTFT_S
            num_delayed = num_prompts * np.minimum(promised_s / np.maximum(queue_s, 1e-9), 1.0)
            self.harm += num_delayed * lost_s / promised_s

    @property
    def ttft_or_full_s(self) -> Floats:
        """As `ttft_s`, much more where there is no place."""
        return self.ttft_s + NO_PLACE_S * self._is_full

    def index(self, slot: int) -> int:
        """Of one of the slots."""
        return int((self.slots == slot).argmax())

    def times(self, slot: int) -> Times:
        """At one node, with the wait for a place there: it comes before the prompt."""
        index = self.index(slot)
        ttft_s, tpot_s = float(self.ttft_s[index]), float(self.tpot_s[index])
        if self._is_full[index]:
            place = self._outlook.place(slot, float(self.begins_s[index]))
            ttft_s += place.wait_s
            tpot_s = place.pace_s + float(self._stalled_s[index])
        return Times(ttft_s, tpot_s)
