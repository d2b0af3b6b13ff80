"""Whatever comes and goes under whatever policy: all get their tokens, and no block is lost."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.core import EngineCore
from pdserve.engine.interface import shape_of
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.kv.shortage import KvHeadroom, Victims
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Targets
from pdserve.measured.output_lengths import OutputLengths
from pdserve.settings.config import DecodePolicyName, Headroom
from pdserve.shared.clock import ManualClock
from tests.fakes.runner import (
    FakeRunner,
    decode_policy,
    expected_output,
    next_token,
)
from tests.matrix import examples
from tests.requests import make_request
from tests.unit.decode_node.batches import BLOCK, linear_perf

NUM_BLOCKS = 14
MAX_STEPS = 5000


class CheckedVictims(Victims):
    """Asserts that whoever is to be spared is spared while there is anybody else."""

    def choose(self, running: Iterable[Request], needy: Request) -> Request:
        running = list(running)
        victim = super().choose(running, needy)
        assert victim.targets.priority <= needy.targets.priority
        if victim.num_preemptions >= self.max_preemptions and victim is not needy:
            for other in running:
                can_give_way = other.leg_token_limit is None
                if can_give_way and other.targets.priority <= needy.targets.priority:
                    assert other.num_preemptions >= self.max_preemptions
        return victim


@dataclass
class Arrival:
    at_step: int
    num_prompt: int
    max_tokens: int
    priority: int
    tpot_s: float
    is_handed_off: bool
    cancel_after: int | None  # steps


@dataclass
class World:
    """An engine without a loop, requests on their way to it, and KV that is fetched back."""

    core: EngineCore
    rng: random.Random
    clock: ManualClock
    arriving: list[tuple[int, Request]] = field(default_factory=list)  # (step of adoption, whom)
    recalled: list[tuple[int, Request]] = field(default_factory=list)
    step: int = 0

    def arrive(self, request: Request, *, is_handed_off: bool) -> None:
        request.lifecycle.received_s = self.clock.now()
        if is_handed_off:
            request.extend_hashes(request.num_tokens, BLOCK)
            self.core.queues.claims.append(request)
        else:
            self.core.submit(request)

    def cancel(self, request: Request) -> None:
        queues = self.core.queues
        if request in queues.claims:
            queues.claims.remove(request)
        elif request in queues.arriving:
            self.arriving = [(s, r) for s, r in self.arriving if r is not request]
            queues.arriving.discard(request)
            self.core.pool.release(request.block_table)
        else:
            self.recalled = [(s, r) for s, r in self.recalled if r is not request]
            self.core.cancel(request.request_id)

    def advance(self) -> None:
        """What happens between two steps."""
        queues, policy = self.core.queues, self.core.policy
        for request in queues.preemptions.to_recall:
            self.recalled.append((self.step + self.rng.randint(0, 7), request))
        queues.preemptions.to_recall.clear()
        for _, request in [a for a in self.recalled if a[0] <= self.step]:
            self.core.submit(request)
        self.recalled = [a for a in self.recalled if a[0] > self.step]
        while (first := policy.first(queues)) in queues.claims:  # type: ignore[attr-defined]
            if not policy.has_place(queues.beside(first), first):  # type: ignore[attr-defined]
                break
            num_tokens = first.num_tokens + 1
            reserved = self.core.reserve(num_tokens, first.block_hashes, first)
            if reserved is None:
                break
            first.block_table = reserved[0]
            queues.claims.remove(first)
            queues.arriving.add(first)
            self.arriving.append((self.step + self.rng.randint(0, 3), first))
        for _, request in [a for a in self.arriving if a[0] <= self.step]:
            tokens = request.prompt_token_ids
            request.num_computed_tokens = len(tokens)
            request.output_token_ids = [next_token(tokens)]
            request.lifecycle.prefill_end_s = self.clock.now()
            self.core.adopt(request)
        self.arriving = [a for a in self.arriving if a[0] > self.step]


def run(world: World, arrivals: list[Arrival], runner: FakeRunner) -> list[Request]:
    """Until all is over; the requests that were not cancelled."""
    core, perf = world.core, linear_perf()
    requests: list[Request] = []
    cancels: list[tuple[int, Request]] = []
    pending = sorted(arrivals, key=lambda arrival: arrival.at_step)
    while pending or core.num_requests or core.queues.claims or core.queues.arriving:
        world.step += 1
        assert world.step < MAX_STEPS, "somebody waits for ever"
        while pending and pending[0].at_step <= world.step:
            arrival = pending.pop(0)
            request = make_request(
                arrival.num_prompt,
                max_tokens=max(2, arrival.max_tokens),
                targets=Targets(
                    tpot_s=arrival.tpot_s,
                    priority=arrival.priority,
                    payer=f"p{arrival.priority}",
                ),
            )
            requests.append(request)
            world.arrive(request, is_handed_off=arrival.is_handed_off)
            if arrival.cancel_after is not None:
                cancels.append((world.step + arrival.cancel_after, request))
        for at_step, request in cancels:
            if at_step == world.step and not request.is_done:
                world.cancel(request)
                request.is_cancelled = True
        world.advance()
        rows = core.begin_step()
        world.clock.advance(perf.step_s(shape_of(rows)) if rows else 0.01)
        if rows:
            sampled = runner.execute(rows)
            for request in core.end_step(rows, sampled, world.clock.now()):
                core.forget(request)
        core.pool.check_integrity()
    return [request for request in requests if not request.is_cancelled]


arrivals = st.builds(
    Arrival,
    at_step=st.integers(0, 60),
    num_prompt=st.integers(1, 24),
    max_tokens=st.integers(2, 24),
    priority=st.integers(0, 2),
    tpot_s=st.sampled_from([0.012, 0.02, 0.2, float("inf")]),
    is_handed_off=st.booleans(),
    cancel_after=st.none() | st.integers(0, 40),
)


@settings(max_examples=examples(150))
@given(
    arrivals=st.lists(arrivals, min_size=1, max_size=14),
    policy=st.sampled_from(get_args(DecodePolicyName)),
    headroom=st.sampled_from(get_args(Headroom)),
    mean_tokens=st.sampled_from([1.0, 8.0, 256.0]),
    num_watermark_blocks=st.integers(0, 2),
    max_preemptions=st.integers(0, 3),
    prefix_cache=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_all_get_their_tokens_and_no_block_is_lost(
    arrivals: list[Arrival],
    policy: DecodePolicyName,
    headroom: Headroom,
    mean_tokens: float,
    num_watermark_blocks: int,
    max_preemptions: int,
    prefix_cache: bool,
    seed: int,
) -> None:
    clock = ManualClock()
    pool = BlockPool(NUM_BLOCKS, BLOCK, prefix_cache=prefix_cache)
    kept_free = KvHeadroom(BLOCK, headroom, num_watermark_blocks)
    kept_free.lengths = OutputLengths(mean_tokens)
    victims = CheckedVictims(max_preemptions)
    rng = random.Random(seed)
    queues = Queues(pool, clock, kept_free, victims, lambda _: rng.random() < 0.5)
    core = EngineCore(queues, decode_policy(20, 6, policy, linear_perf(), clock), frozenset())
    world = World(core, rng, clock)
    for request in run(world, arrivals, FakeRunner(BLOCK)):
        assert request.output_token_ids == expected_output(request)
    assert pool.num_free == NUM_BLOCKS
    assert not queues.waiting
    assert not queues.running
    assert not queues.preemptions.away
    if headroom == "reserve-static" and len({one.priority for one in arrivals}) == 1:
        assert queues.preemptions.statistics.for_blocks == 0, "all that they may need was kept"
