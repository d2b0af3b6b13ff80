"""What a prefill node computes next: the first prompts in order, as many as fill the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.engine.prompts.order import PromptOrder
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.engine.step_shape import shape_of
from pdserve.perf_model import PerfModel
from prefill_node.policies.batch_sizes import BatchSizes

MAX_HALF_DONE = 4  # prompts with blocks for all of their tokens that wait for their next chunk


@dataclass(frozen=True, slots=True)
class PromptBatches:
    """Prompts that saturate the machine together, and no more; a longer one alone, in chunks.

    More in a step would make all of them wait for the last one and gain nothing (DistServe's L_m).
    With less there would be time to win, so that the last one may be in it in part. Between two
    chunks a prompt gives way to whoever comes first then.

    A prompt is begun only if so many blocks stay free beside it, or if it is alone: nothing runs,
    and no KV waits to be pulled. Otherwise KV that nobody pulls would fill the pool, and push out
    the prefixes that others could reuse. Streams that a decode node has left over from a former
    role get their token first: they are few, and become fewer.
    """

    order: PromptOrder
    sizes: BatchSizes
    perf: PerfModel
    max_batch_size: int
    num_kept_free: int = 0
    num_pinned: Callable[[], int] = field(default=lambda: 0)  # blocks held for others to pull

    def plan(self, queues: Queues) -> list[Scheduled]:
        """One token for each leftover stream, then prompts."""
        has_begun_prompt = any(not request.is_decoding for request in queues.running)
        rows = queues.plan_decodes(self.max_batch_size - has_begun_prompt)
        rows += self._plan_prompts(queues, len(rows))
        if rows:
            self.order.charge(rows, self.perf.step_s(shape_of(rows)))
        return rows

    def _plan_prompts(self, queues: Queues, num_decodes: int) -> list[Scheduled]:
        """The first prompts, as far as they fit into a step beside so many decoding requests.

        A waiting prompt that cannot be begun now keeps those behind it from being begun: nobody
        goes past it. The ones that were begun go on meanwhile, so that it is not for ever.
        """
        queues.held_back.stop()
        queues.kept_out = None
        rows: list[Scheduled] = []
        num_left, batch = max(1, self.sizes.chunk - num_decodes), 0  # for the first one
        half_done = [request for request in queues.running if not request.is_decoding]
        for prompt in self.order.prompts([*half_done, *queues.waiting], queues.pool):
            if num_left <= 0 or num_decodes + len(rows) == self.max_batch_size:
                break
            request, is_waiting = prompt.request, not prompt.request.block_table
            if is_waiting and queues.kept_out is not None:
                continue
            if rows and prompt.batch != batch:
                break
            is_whole = prompt.num_uncached <= num_left
            if is_waiting and not self._begin(queues, rows, request, is_whole=is_whole):
                continue
            num_uncomputed = request.num_uncomputed_tokens
            num_tokens = min(num_uncomputed, num_left) if rows else _piece(num_uncomputed, num_left)
            rows.append(Scheduled(request, num_tokens))
            num_left = self.sizes.batch_tokens - num_decodes - sum(row.num_tokens for row in rows)
            batch = prompt.batch
        return rows

    def _begin(
        self, queues: Queues, rows: Sequence[Scheduled], request: Request, *, is_whole: bool
    ) -> bool:
        """Give a waiting prompt its blocks; False: not now.

        Few are half-done at a time, or they would hold most of the pool for nothing; a step is
        filled with the beginning of another prompt only when none is.
        """
        if is_whole or _num_half_done(queues, rows, request) < (1 if rows else MAX_HALF_DONE):
            # What streams hold is no KV that nobody pulls, and soon free.
            num_streamed = sum(len(stream.block_table) for stream in queues.decoding)
            num_kept_free = max(0, self.num_kept_free - num_streamed)
            if queues.admit(request, num_kept_free, is_alone=self.num_pinned() == 0):
                return True
            if request not in queues.waiting:
                return False  # its KV is being fetched
        queues.kept_out = request
        return False


def _piece(num_tokens: int, chunk: int) -> int:
    """One of as many equal ones as there are chunks: a small rest would take long for little."""
    num_pieces = -(-num_tokens // chunk)
    return -(-num_tokens // num_pieces)


def _num_half_done(queues: Queues, rows: Sequence[Scheduled], newcomer: Request) -> int:
    """Prompts that will be half-done after a step of these rows.

    Those of lower priority do not count, as they must not keep the newcomer out.
    """
    ending = {row.request for row in rows if row.reaches_end}
    return sum(
        request.targets.priority >= newcomer.targets.priority
        for request in queues.running
        if not request.is_decoding and request not in ending
    )
