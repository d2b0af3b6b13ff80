"""The steps that a node measures when it profiles itself.

    prompts:  a ladder of chunk lengths: alone, after a short and a long prefix, and two chunks
    decodes:  a ladder of batch sizes, each with short, medium and long contexts
    mixed:    chunks beside decodes

They are ordered by cost. So if there is no time for all of them, at least the beginning of each
ladder is measured, from which the model extrapolates. Steps of few tokens take as long as reading
the weights, and say nothing of prompts: so a larger chunk comes second, and is always measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.kv import need
from pdserve.measured.perf_model import StepRow, StepShape
from pdserve.node.profiling.fit import token_ladder

Step = tuple[StepRow, ...]

# Attention is linear in the context long before this limit. It also bounds the memory of the pool
# that profiling touches, which stays allocated.
MAX_CONTEXT_TOKENS = 1 << 16
MAX_PROMPT_TOKENS = 1 << 13
# The cost of a query-key pair is measured with chunks that are large enough to share their reads of
# the prefix, and small enough that a slow machine has time for some of them.
LEAST_CHUNK = 32
ALWAYS = 2  # steps that are measured however long they take
PAIRS_OF_A_TOKEN = 500  # pairs whose attention is about as much work as a token's linear layers


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of a node's steps."""

    token_budget: int
    max_batch_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV the pool holds."""
        return need.tokens_in(self.num_blocks, self.block_size)

    @property
    def longest(self) -> int:
        """Most tokens of a request that is profiled."""
        return min(self.max_model_len, self.num_kv_tokens, MAX_PROMPT_TOKENS)

    @property
    def context_tokens(self) -> int:
        """Most tokens of all requests of a profiled step together."""
        return min(self.num_kv_tokens, max(MAX_CONTEXT_TOKENS, self.longest))

    def allow(self, step: Step) -> bool:
        """Whether the node can run this step."""
        lengths = [row.num_before + row.num_tokens for row in step]
        num_blocks = sum(need.blocks_for(length, self.block_size) for length in lengths)
        return (
            0 < len(step) <= self.max_batch_size
            and min(row.num_tokens for row in step) > 0
            and sum(row.num_tokens for row in step) <= self.token_budget
            and max(lengths) <= self.longest
            and need.tokens_in(num_blocks, self.block_size) <= self.context_tokens
        )


def work(step: Step) -> float:
    """Roughly how much work a step is, in tokens; for ordering steps."""
    shape = StepShape.of(step)
    return shape.num_tokens + (shape.prefill_pairs + shape.decode_context) / PAIRS_OF_A_TOKEN


def steps_to_profile(limits: StepLimits) -> list[Step]:
    """Distinct steps, cheap ones first, but for the second; at least one."""
    steps = {*_prompts(limits), *_decodes(limits), *_mixed(limits)}
    allowed = [step for step in steps if limits.allow(step)]
    first, *others = sorted(allowed, key=lambda step: (work(step), step))
    alone = [step for step in others if len(step) == 1 and not step[0].is_decoding]
    small = [step for step in alone if step[0].num_tokens <= LEAST_CHUNK]
    if not small:
        return [first, *others]
    largest = max(small, key=lambda step: (step[0].num_tokens, -step[0].num_before))
    others.remove(largest)
    return [first, largest, *others]


def _prompts(limits: StepLimits) -> list[Step]:
    steps: list[Step] = []
    for length in token_ladder(min(limits.token_budget, limits.longest)):
        room = limits.longest - length
        steps.append((StepRow(length, 0),))
        if _is_power(length) and length >= LEAST_CHUNK:
            steps += [(StepRow(length, min(room, factor * length)),) for factor in (1, 4)]
            steps.append((StepRow(length // 2, 0), StepRow(length - length // 2, length // 2)))
    return steps


def _decodes(limits: StepLimits) -> list[Step]:
    steps: list[Step] = []
    for batch in token_ladder(min(limits.max_batch_size, limits.token_budget)):
        most = min(limits.longest, limits.context_tokens // batch) - limits.block_size
        if _is_power(batch) or batch == limits.max_batch_size:
            steps += [_decode(batch, context) for context in (most // 64, most // 8, most)]
    return steps


def _mixed(limits: StepLimits) -> list[Step]:
    steps: list[Step] = []
    context = limits.longest // 4
    for batch in (limits.max_batch_size // 8, limits.max_batch_size // 2):
        decodes, room = _decode(batch, context), limits.token_budget - batch
        chunks = [StepRow(length, context, is_sampled=False) for length in (room // 4, room)]
        steps += [(*decodes, chunk) for chunk in chunks]
    return steps


def _decode(batch: int, most_context: int) -> Step:
    """A decode step whose requests have contexts of different lengths, as in service."""
    contexts = [max(1, most_context * number // batch) for number in range(1, batch + 1)]
    return tuple(StepRow(1, context, is_decoding=True) for context in contexts)


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0
