"""Prefill batches: the first prompts in order, as many as saturate the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.engine.interface import shape_of
from pdserve.engine.prompts.order import BatchSizes, PromptOrder
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.measured.perf_model import PerfModel

MAX_HALF_DONE = 4  # prompts that hold all their blocks and wait for their next chunk


@dataclass(frozen=True, slots=True)
class PromptBatches:
    """Batches prompts until they saturate the machine; a longer prompt runs alone, in chunks.

    More prompts in a step would make all of them wait for the last one and gain nothing
    (DistServe's L_m). Fewer would waste time, so the last prompt may be included in part. Between
    two chunks a prompt gives way to the prompt that is then first.

    A prompt is begun only if `num_kept_free` blocks stay free beside it, or if it is alone: nothing
    runs, and no KV waits to be pulled. Otherwise KV that is not pulled would fill the pool, and
    evict prefixes that other requests could reuse. Streams left over from a former decode role get
    their token first: they are few, and become fewer.
    """

    order: PromptOrder
    sizes: BatchSizes
    perf: PerfModel
    max_batch_size: int
    num_kept_free: int = 0
    num_pinned: Callable[[], int] = field(default=lambda: 0)  # blocks held for others to pull

    def plan(self, queues: Queues) -> list[Scheduled]:
        """Plan one token for each leftover stream, then prompts."""
        self.order.present([*queues.running, *queues.waiting])
        has_begun_prompt = any(not request.is_decoding for request in queues.running)
        rows = queues.plan_decodes(self.max_batch_size - has_begun_prompt)
        rows += self._plan_prompts(queues, len(rows))
        if rows:
            self.order.charge(rows, self.perf.step_s(shape_of(rows)))
        return rows

    def _plan_prompts(self, queues: Queues, num_decodes: int) -> list[Scheduled]:
        """Plan the first prompts, as far as they fit into a step with `num_decodes` decodes.

        A waiting prompt that cannot be begun now keeps those behind it from being begun, so none
        overtakes it. Prompts that have begun continue meanwhile, so the wait ends.
        """
        queues.held_back.stop()
        queues.kept_out = None
        rows: list[Scheduled] = []
        num_left, batch = max(1, self.sizes.chunk - num_decodes), 0  # tokens for the first one
        half_done = [request for request in queues.running if not request.is_decoding]
        for prompt in self.order.prompts([*half_done, *queues.waiting], queues.pool):
            if num_left <= 0 or num_decodes + len(rows) == self.max_batch_size:
                break
            request, is_waiting = prompt.request, not prompt.request.block_table
            if is_waiting and queues.kept_out is not None:
                continue
            if rows and prompt.batch != batch:
                break
            if rows and not self.order.may_join(request, rows[0].request):
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
        """Allocate a waiting prompt's blocks; False if it cannot begin now.

        Few prompts may be half-done at a time, since they hold most of the pool for no benefit. A
        step is filled with the beginning of another prompt only if none is half-done.
        """
        if is_whole or _num_half_done(queues, rows, request) < (1 if rows else MAX_HALF_DONE):
            # Blocks of streams hold no KV that waits to be pulled, and are freed soon.
            num_streamed = sum(len(stream.block_table) for stream in queues.decoding)
            num_kept_free = max(0, self.num_kept_free - num_streamed)
            if queues.admit(request, num_kept_free, is_alone=self.num_pinned() == 0):
                return True
            if request not in queues.waiting:
                return False  # its KV is being fetched
        queues.kept_out = request
        return False


def _piece(num_tokens: int, chunk: int) -> int:
    """Return the size of equal pieces, as many as there are chunks.

    A small rest would take a step of its own, which is long for few tokens.
    """
    num_pieces = -(-num_tokens // chunk)
    return -(-num_tokens // num_pieces)


def _num_half_done(queues: Queues, rows: Sequence[Scheduled], newcomer: Request) -> int:
    """Count the prompts that will be half-done after a step of these rows.

    Prompts of lower priority do not count, as they must not keep the newcomer out.
    """
    ending = {row.request for row in rows if row.reaches_end}
    return sum(
        request.targets.priority >= newcomer.targets.priority
        for request in queues.running
        if not request.is_decoding and request not in ending
    )
