"""Payers of equal priority share the places of a full batch."""

from __future__ import annotations

import pytest

from pdserve.engine.request import Request, Scheduled
from pdserve.settings.config import DecodePolicyName
from tests.fakes.runner import decode_policy
from tests.unit.decode_node.batches import Batch

PLACES = 8
SERVED = 150  # steps of 17 ms: more than a burst of service


class FullBatch(Batch):
    """All of its places are Alice's, and more of her requests wait."""

    def __init__(self, policy: DecodePolicyName = "tpot-cap") -> None:
        super().__init__()
        self.policy = decode_policy(512, PLACES, policy, self.perf, self.clock)
        for _ in range(PLACES):
            self.decoding(payer="alice", max_tokens=10_000)
        for _ in range(PLACES):
            self.waiting(8, payer="alice")
        self.step(SERVED)

    def ask(self, payer: str, count: int = 1, weight: float = 1.0) -> list[Request]:
        requests = [self.waiting(8, payer=payer) for _ in range(count)]
        for request in requests:
            request.targets = type(request.targets)(payer=payer, weight=weight)
        return requests

    def step(self, count: int = 1) -> None:
        """Plan steps, and compute them: prompts that were planned have token 1 then."""
        for _ in range(count):
            for row in self.policy.plan(self.queues):
                request = row.request
                request.num_computed_tokens += row.num_tokens
                if request.num_computed_tokens == request.num_tokens:
                    request.output_token_ids.append(1)
                    request.lifecycle.first_token_s = self.clock.now()
            self.clock.advance(0.02)

    def places(self, payer: str) -> int:
        return sum(request.targets.payer == payer for request in self.queues.running)

    @property
    def num_preempted(self) -> int:
        return self.queues.preemptions.statistics.for_priority


@pytest.mark.parametrize("policy", ["max-batch", "tpot-cap", "slack-batch"])
def test_another_payer_gets_a_place_at_once(policy: DecodePolicyName) -> None:
    batch = FullBatch(policy)
    (request,) = batch.ask("bob")
    batch.step()
    assert request in batch.queues.running
    assert batch.num_preempted == 1


def test_alone_a_payer_uses_all_places_and_keeps_them() -> None:
    batch = FullBatch()
    batch.step(20)
    assert batch.places("alice") == PLACES
    assert batch.num_preempted == 0


def test_payers_that_got_about_the_same_wait_for_each_other() -> None:
    batch = FullBatch()
    batch.policy.line.charge_chunks(
        [Scheduled(request, 1) for request in batch.ask("bob")], SERVED * 0.017
    )
    batch.step(5)
    assert batch.places("bob") == batch.num_preempted == 0


def test_two_floods_settle_at_equal_shares() -> None:
    batch = FullBatch()
    batch.ask("bob", PLACES)
    batch.step(400)
    assert batch.places("alice") == batch.places("bob") == PLACES // 2
    assert batch.num_preempted == PLACES // 2, "nobody gives way in turns"


def test_shares_go_by_weight() -> None:
    batch = FullBatch()
    batch.ask("bob", PLACES, weight=3.0)
    batch.step(400)
    assert (batch.places("alice"), batch.places("bob")) == (2, 6)


def test_many_payers_get_a_place_each() -> None:
    batch = FullBatch()
    for number in range(2 * PLACES):
        batch.ask(f"payer-{number}")
    batch.step(50)
    assert batch.places("alice") == 1
    assert len({request.targets.payer for request in batch.queues.running}) == PLACES


def test_whoever_gave_way_does_not_take_the_place_back_from_those_who_wait() -> None:
    batch = FullBatch()
    first, second, third = batch.ask("bob", 3)
    batch.step(4)
    assert {first, second, third} <= set(batch.queues.running)
    batch.ask("bob")
    batch.queues.remove(first)
    batch.step()
    assert batch.places("bob") == 3
    assert batch.num_preempted == 3
