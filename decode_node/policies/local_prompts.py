"""Prompts prefilled beside running decodes, in chunks: stall-free batching (Sarathi-Serve).

A chunk is as large as the running decodes' TPOT allows: the most tokens with which the predicted
time of the mixed step stays within it. Sarathi profiles one token budget per TPOT target; here the
budget follows from the performance model, so it shrinks with the batch and its context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from decode_node.policies.interface import DecodePolicy
from decode_node.policies.lent_time import MIN_CHUNK, LentTime
from decode_node.policies.line import DecodeLine
from decode_node.policies.pace import Pace
from pdserve.engine.interface import shape_of
from pdserve.engine.prompts.order import BatchSizes, QueuedPrompt
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.measured.perf_model import StepShape, chunk_pairs
from pdserve.rules.batch import SAFETY

MOST_SKIPPED: Final = 8  # most steps in a row in which decodes may defer the first prompt


class LocalPrompts:
    """Plans the prompt chunks of one step, including leftover prefill legs of a former role."""

    def __init__(
        self, pace: Pace, line: DecodeLine, token_budget: int, max_batch_size: int, local_chunk: int
    ) -> None:
        """
        Args:
            pace: predicted step times and promised latencies.
            line: the order of waiting requests.
            token_budget: most tokens of a step.
            max_batch_size: most rows of a step.
            local_chunk: most prompt tokens in a step with decodes; 0: what the TPOT targets allow.
        """
        self._pace = pace
        self._line = line
        self._lent_time = LentTime(pace, line, token_budget)
        self._token_budget = token_budget
        self._max_batch_size = max_batch_size
        self._local_chunk = local_chunk
        self._num_skipped = 0  # steps since the first prompt last progressed

    def plan(
        self,
        queues: Queues,
        decodes: Sequence[Scheduled],
        limit_s: float,
        policy: DecodePolicy,
        sizes: BatchSizes | None = None,
    ) -> list[Scheduled]:
        """Return prompt rows to add to these decodes, so that the step takes at most `limit_s`.

        With `sizes`, it has no more tokens than they say.

        A prompt is begun when the policy has a place for it in the batch, there is room for its KV,
        and no request ahead of it has to wait. The first prompt always gets at least a few tokens:
        in this step if the decodes have enough slack, otherwise in one of the next.
        """
        prompts = self._line.prompts(queues)
        if not prompts:
            return []
        has_begun = any(prompt.request.block_table for prompt in prompts)
        num_left = self._num_tokens(decodes, has_begun=has_begun)
        if sizes is not None:
            num_left = min(num_left, sizes.chunk)
        chunks = _Chunks(shape_of(decodes), num_left, has_begun)
        first_limit_s = self._first_limit_s(prompts, decodes, chunks.shape, limit_s, queues)
        limit_s = min(limit_s, first_limit_s)
        for prompt in prompts:
            if chunks.num_left <= 0 or len(decodes) + len(chunks.rows) >= self._max_batch_size:
                break
            request = prompt.request
            if chunks.rows and not self._line.may_join(request, chunks.rows[0].request):
                break
            if not request.block_table and chunks.keeps_out(request, queues):
                continue  # skipped before predicting its chunk: many may wait
            most = min(chunks.num_left, prompt.num_uncached)
            least = min(most, MIN_CHUNK)
            within_s = first_limit_s if prompt is prompts[0] else limit_s
            num_tokens = self._largest_chunk(chunks.shape, prompt, most, within_s)
            is_enough = num_tokens >= least
            if not request.block_table and not _begin(request, chunks, queues, policy, is_enough):
                continue
            if not chunks.rows and not is_enough:
                if not self._gets_least(_with_chunk(chunks.shape, prompt, least), decodes, limit_s):
                    break
                num_tokens = least
            chunks.add(prompt, num_tokens)
            if sizes is not None:
                chunks.num_left = sizes.batch_tokens - chunks.shape.num_tokens
        if chunks.rows:
            self._num_skipped = 0
        return chunks.rows

    # ---- parts ---------------------------------------------------------------------------------

    def _num_tokens(self, decodes: Sequence[Scheduled], *, has_begun: bool) -> int:
        """Return the most prompt tokens that a step with these decodes may take."""
        num_left = self._token_budget - len(decodes)
        if decodes and self._local_chunk:
            num_left = min(num_left, self._local_chunk)
        return max(num_left, int(has_begun))  # decodes do not starve a prompt that has begun

    def _first_limit_s(
        self,
        prompts: Sequence[QueuedPrompt],
        decodes: Sequence[Scheduled],
        shape: StepShape,
        limit_s: float,
        queues: Queues,
    ) -> float:
        """Return the time limit of this step with the first prompt (`LentTime`)."""
        first = prompts[0]
        usual_chunk = self._largest_chunk(shape, first, first.num_uncached, limit_s)
        streams = [row.request for row in decodes]
        return self._lent_time.limit_s(prompts, usual_chunk, streams, limit_s, queues)

    def _gets_least(self, shape: StepShape, decodes: Sequence[Scheduled], limit_s: float) -> bool:
        """Whether the first prompt gets its few tokens although the step exceeds its limit.

        With a long context, even a few tokens take much time. In every step they would break TPOT
        targets that hold if the decodes first gain as much slack as such a step uses up.
        """
        in_hand_s = self._pace.least_in_hand_s(row.request for row in decodes)
        spare_s = max(limit_s, SAFETY * in_hand_s)
        is_due = self._num_skipped >= MOST_SKIPPED or self._pace.perf.step_s(shape) <= spare_s
        self._num_skipped += not is_due
        return is_due

    def _largest_chunk(
        self, shape: StepShape, prompt: QueuedPrompt, most: int, limit_s: float
    ) -> int:
        """Return the most tokens, up to `most`, with which the step stays within the limit."""

        def fits(num_tokens: int) -> bool:
            return self._pace.perf.step_s(_with_chunk(shape, prompt, num_tokens)) <= limit_s

        if limit_s == inf or fits(most):
            return most
        low, high = 0, most  # `low` fits, or is 0; `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


@dataclass(slots=True)
class _Chunks:
    """The prompt chunks of a step so far, and what else it may take."""

    shape: StepShape  # of the step, decodes and chunks
    num_left: int  # most prompt tokens that may be added
    has_begun: bool  # whether any prompt has begun, in this step or before
    rows: list[Scheduled] = field(default_factory=list)
    a_leg_waits: bool = False  # a prefill leg could not be begun

    def add(self, prompt: QueuedPrompt, num_tokens: int) -> None:
        """Add a chunk of up to `num_tokens` tokens; of a cached prompt fewer may be left."""
        num_tokens = min(num_tokens, prompt.request.num_uncomputed_tokens)
        if num_tokens:
            self.rows.append(Scheduled(prompt.request, num_tokens))
            self.num_left -= num_tokens
            self.shape = _with_chunk(self.shape, prompt, num_tokens)

    def keeps_out(self, request: Request, queues: Queues) -> bool:
        """Whether a prompt must not begin because one before it could not."""
        return self.a_leg_waits or (request.decodes_here and queues.kept_out is not None)


def _begin(
    request: Request, chunks: _Chunks, queues: Queues, policy: DecodePolicy, is_enough: bool
) -> bool:
    """Begin a waiting prompt, or note that it was kept out. Returns whether it has begun.

    `is_enough`: its chunk within the limit of this step is not too small to begin with.

    No request joins the streams ahead of a prompt that is to join them. But a prefill leg must be
    begun beside them, however many there are, or it might wait for ever.
    """
    joins = request.decodes_here
    may_begin = is_enough or not (joins or chunks.has_begun)
    if may_begin and _admit(request, queues, policy):
        chunks.has_begun = True
        return True
    if queues.kept_out is None and request in queues.waiting:  # else its KV is being fetched
        queues.kept_out = request
    chunks.a_leg_waits |= not joins
    return False


def _admit(request: Request, queues: Queues, policy: DecodePolicy) -> bool:
    """Admit a waiting prompt if it is its turn, and there is a place and room for it.

    It is the first prompt in the order of this plan. If another one has become first since, the
    next plan takes it into account.
    """
    if request.decodes_here:
        if policy.first(queues) in queues.claims:
            return False
        if not policy.has_place(queues.beside(request), request):
            return False
    return queues.admit(request)


def _with_chunk(shape: StepShape, prompt: QueuedPrompt, num_tokens: int) -> StepShape:
    num_before = prompt.request.num_tokens - prompt.num_uncached
    return StepShape(
        shape.num_tokens + num_tokens,
        shape.num_sampled + (num_tokens == prompt.num_uncached),
        shape.prefill_pairs + chunk_pairs(num_tokens, num_before),
        shape.decode_context,
    )
