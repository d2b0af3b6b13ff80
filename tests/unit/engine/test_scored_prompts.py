"""Prompts whose log-probabilities are asked for: KV is reused only of tokens that have theirs."""

from __future__ import annotations

from msgspec import structs

from pdserve.engine.core import EngineCore
from pdserve.engine.interface import shape_of
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.prompt_results.results import scored_positions
from pdserve.engine.prompts.order import num_uncached
from pdserve.engine.request import Request, SampledToken
from pdserve.engine.scheduler import Queues
from pdserve.protocol import FinishReason, TokenLogprobs
from pdserve.shared.clock import ManualClock
from tests.fakes.runner import (
    prefill_policy,
)
from tests.requests import make_request, work_of

BLOCK = 4
PROMPT = 22


def make_core() -> EngineCore:
    pool = BlockPool(40, BLOCK)
    return EngineCore(Queues(pool, ManualClock()), prefill_policy(10, 8), frozenset())


def scored_request(max_tokens: int = 2) -> Request:
    return make_request(PROMPT, max_tokens=max_tokens, leg_token_limit=1, prompt_logprobs=0)


def step(core: EngineCore) -> list[Request]:
    """One step, in which a runner would have scored what it computes."""
    rows = core.begin_step()
    for row in rows:
        if row.request.prompt_work is not None:
            scores = [TokenLogprobs(chosen=-1.0) for _ in scored_positions(row)]
            row.request.prompt_work.logprobs += scores
    sampled = [SampledToken(7) if row.samples else None for row in rows]
    done = core.end_step(rows, sampled, 1.0)
    for request in done:
        core.forget(request)
    return done


def with_prompt_cached(core: EngineCore) -> None:
    core.submit(make_request(PROMPT, max_tokens=1))
    for _ in range(3):
        step(core)
    assert core.num_requests == 0


def test_a_cached_prompt_is_computed_whole() -> None:
    core = make_core()
    with_prompt_cached(core)
    plain, scored = make_request(PROMPT), scored_request()
    assert num_uncached(plain, core.pool) == 2
    assert num_uncached(scored, core.pool) == PROMPT
    core.submit(scored)
    (row,) = core.begin_step()
    assert (scored.num_computed_tokens, scored.num_cached_tokens) == (0, 0)
    assert shape_of([row]).num_sampled == row.num_tokens == 8


def test_a_prompt_that_gave_way_goes_on_behind_what_is_scored() -> None:
    core = make_core()
    scored = scored_request()
    core.submit(scored)
    step(core)
    core.queues.preempt(scored, for_priority=True)
    assert len(work_of(scored).logprobs) == 8
    step(core)
    assert scored.num_computed_tokens == 15  # 8 were still cached; the rest comes in halves
    step(core)
    assert len(work_of(scored).logprobs) == PROMPT - 1
    assert scored.output_token_ids == [7]


def test_what_others_cached_meanwhile_is_not_skipped() -> None:
    core = make_core()
    with_prompt_cached(core)
    scored = scored_request()
    work_of(scored).logprobs = [TokenLogprobs(chosen=-1.0)] * 10
    core.submit(scored)
    core.begin_step()
    assert scored.num_computed_tokens == 8


def test_where_no_token_is_wanted_the_first_is_the_end() -> None:
    core = make_core()
    request = scored_request(max_tokens=0)
    request.sampling = structs.replace(request.sampling, stop_token_ids=[7])
    core.submit(request)
    for _ in range(3):
        step(core)
    assert request.finish_reason is FinishReason.LENGTH
    assert request.stop_token_id is None


def test_prompts_that_are_all_there_is_fill_steps_like_others() -> None:
    plans = []
    for max_tokens in (0, 1):
        core = make_core()
        for num_tokens in (6, PROMPT):
            core.submit(make_request(num_tokens, max_tokens=max_tokens, leg_token_limit=1))
        plans.append([row.num_tokens for row in core.begin_step()])
    assert plans == [[6, 4], [6, 4]], "the first is over with this step, and not half-done"
