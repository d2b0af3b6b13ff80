"""A prefill node that also has streams: whose policy plans, and who waits for whom."""

from __future__ import annotations

from pdserve.engine.core import EngineCore
from pdserve.engine.interface import shape_of
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Lifecycle, Targets
from pdserve.measured.perf_model import PerfModel
from pdserve.node.role_policy import PrefillRolePolicy
from pdserve.protocol import Prompt, SamplingParams, Slo, StepCosts
from pdserve.shared.clock import ManualClock
from tests.fakes.runner import decode_policy, prefill_policy

BLOCK, NUM_BLOCKS, MOST_PINNED = 4, 100, 50
TPOT_S = 0.030
# A step of ten milliseconds, and one more for each token.
PERF = PerfModel(StepCosts(knot_tokens=[1, 100], knot_s=[0.011, 0.110]))


class Bench:
    """An engine whose steps a test takes one by one; prompts that are done stay pinned."""

    def __init__(self, most_pinned: int = MOST_PINNED) -> None:
        self.pool = BlockPool(NUM_BLOCKS, BLOCK)
        self.pinned: list[list[int]] = []
        clock = ManualClock()
        policy = PrefillRolePolicy(
            prefill_policy(100, 16, perf=PERF, clock=clock),
            decode_policy(100, 16, "tpot-cap", perf=PERF, clock=clock),
            lambda: sum(map(len, self.pinned)),
            most_pinned,
        )
        self.core = EngineCore(Queues(self.pool, clock), policy, frozenset())

    def submit(self, name: str, num_tokens: int, *, is_leg: bool, max_tokens: int = 50) -> Request:
        request = Request(
            request_id=name,
            prompt=Prompt([sum(map(ord, name))] * num_tokens, name),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            lifecycle=Lifecycle(received_s=0.0),
            leg_token_limit=1 if is_leg else None,
            targets=Targets.of(Slo(tpot_s=TPOT_S), 0.0),
        )
        self.core.submit(request)
        return request

    def step(self) -> list[Scheduled]:
        rows = self.core.begin_step()
        tokens = [SampledToken(1) if row.samples else None for row in rows]
        for request in self.core.end_step(rows, tokens, 0.0):
            if request.leg_token_limit is not None:
                self.pool.retain(request.block_table)
                self.pinned.append(list(request.block_table))
            self.core.forget(request)
        return rows

    def pull(self) -> None:
        """Somebody has pulled the oldest KV."""
        self.pool.release(self.pinned.pop(0))


def test_without_streams_prompts_are_computed_as_on_any_prefill_node() -> None:
    bench = Bench()
    bench.submit("leg", 90, is_leg=True)
    assert [row.num_tokens for row in bench.step()] == [90]


def test_streams_keep_their_tpot_beside_prompts_and_prompts_get_on() -> None:
    bench = Bench()
    bench.submit("stream", 4, is_leg=False)
    bench.step()
    leg = bench.submit("leg", 90, is_leg=True)
    num_steps = 0
    while leg.finish_reason is None and not bench.pinned:
        rows = bench.step()
        assert [row.request.request_id for row in rows] == ["stream", "leg"]
        assert PERF.step_s(shape_of(rows)) <= TPOT_S
        num_steps += 1
    assert num_steps > 4


def test_with_the_last_stream_the_prefill_policy_is_back() -> None:
    bench = Bench()
    bench.submit("stream", 4, is_leg=False, max_tokens=2)
    bench.step()
    bench.submit("leg", 95, is_leg=True)
    first, second = bench.step(), bench.step()
    assert len(first) == 2
    assert [row.request.request_id for row in second] == ["leg"]
    assert second[0].num_tokens > 4 * first[1].num_tokens


def test_a_stream_keeps_its_tpot_to_its_last_token_before_another_node_takes_it_over() -> None:
    bench = Bench()
    stream = bench.submit("stream", 4, is_leg=False)
    bench.step()
    bench.submit("leg", 95, is_leg=True)
    stream.leg_token_limit = len(stream.output_token_ids) + 1
    last, first_without = bench.step(), bench.step()
    assert [row.request.request_id for row in last] == ["stream", "leg"]
    assert PERF.step_s(shape_of(last)) <= TPOT_S
    assert first_without[0].num_tokens > 4 * last[1].num_tokens


def test_who_made_way_for_a_claim_does_not_come_back_before_it() -> None:
    bench = Bench()
    victim = bench.submit("victim", 8, is_leg=False)
    claim = Request(
        request_id="claim",
        prompt=Prompt([1] * 8),
        sampling=victim.sampling,
        lifecycle=Lifecycle(received_s=0.0),
        targets=Targets.of(Slo(tpot_s=TPOT_S, priority=1), 0.0),
    )
    bench.core.queues.claims.append(claim)
    assert bench.step() == []
    bench.core.queues.claims.remove(claim)
    assert [row.request for row in bench.step()] == [victim]


def test_kv_that_nobody_pulls_keeps_legs_out_beside_streams_but_not_the_streams() -> None:
    bench = Bench()
    bench.submit("stream", 4, is_leg=False, max_tokens=100)
    bench.step()
    for number in range(8):
        bench.submit(f"leg-{number}", 80, is_leg=True)
    for _ in range(60):
        bench.step()
    assert len(bench.pinned) == 3, "60 of 100 blocks: the one that passes the limit is the last"
    queues = bench.core.queues
    assert len(queues.waiting) == 5
    assert queues.kept_out is queues.waiting[0]
    local = bench.submit("local", 8, is_leg=False, max_tokens=3)
    for _ in range(3):
        bench.step()
    assert local.finish_reason is not None, "what pins nothing goes past"
    while bench.pinned:
        bench.pull()
        for _ in range(20):
            bench.step()
    assert not queues.waiting
    assert not bench.core.queues.running
    assert bench.pool.num_free == NUM_BLOCKS
    bench.pool.check_integrity()


def test_a_limit_of_less_than_a_block_lets_one_leg_begin_at_a_time() -> None:
    bench = Bench(most_pinned=0)
    bench.submit("stream", 4, is_leg=False, max_tokens=100)
    bench.step()
    for number in range(2):
        bench.submit(f"leg-{number}", 16, is_leg=True)
    for _ in range(10):
        bench.step()
    assert len(bench.pinned) == 1
    bench.pull()
    for _ in range(10):
        bench.step()
    assert len(bench.pinned) == 1
    assert not bench.core.queues.waiting


def test_streams_that_flow_are_not_spared() -> None:
    bench = Bench()
    stream = bench.submit("stream", 4, is_leg=False)
    stream.flows = True
    bench.step()
    bench.submit("prompt", 90, is_leg=False).flows = True
    assert [row.num_tokens for row in bench.step()] == [1, 90]
    bench.submit("spared", 4, is_leg=False)
    while not any(row.request.request_id == "spared" for row in bench.step()):
        pass
    bench.submit("late", 90, is_leg=False).flows = True
    rows = bench.step()
    assert PERF.step_s(shape_of(rows)) <= TPOT_S, "one of them has to be spared"
