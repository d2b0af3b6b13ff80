"""Nodes and the router have one answer to "is there a place in this batch?"."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coordinator.routing.placement import Newcomer
from decode_node.policies import DecodePolicy
from pdserve.engine.request import Request
from pdserve.lifecycle import Targets
from pdserve.measured.perf_model import PerfModel
from pdserve.protocol import NodeRole, PerfReport, StepCosts
from pdserve.rules.batch import aimed_s, has_place
from pdserve.shared.clock import ManualClock
from tests.fakes.runner import decode_policy
from tests.matrix import examples
from tests.requests import make_request
from tests.unit.coordinator.routing.nodes import BLOCK_SIZE, NUM_BLOCKS, Nodes

COSTS = StepCosts(knot_tokens=[1, 40], knot_s=[0.010, 0.050], context_s=1e-5)
BUDGET = 64


def policy(name: str, max_batch: int) -> DecodePolicy:
    return decode_policy(BUDGET, max_batch, name, PerfModel(COSTS), ManualClock())  # type: ignore[arg-type]


def request(num_tokens: int, tpot_s: float) -> Request:
    return make_request(num_tokens, targets=Targets(tpot_s=tpot_s))


@settings(max_examples=examples(200), deadline=None)
@given(
    contexts=st.lists(st.integers(1, 150), max_size=20),
    newcomer=st.integers(1, 150),
    spare_rows=st.integers(-1, 2),
    tpot_s=st.floats(0.015, 0.1),
)
def test_node_policies_and_the_router_find_a_place_in_the_same_batches(
    contexts: list[int], newcomer: int, spare_rows: int, tpot_s: float
) -> None:
    """All of one TPOT, for which `tpot-cap` and `slack-batch` are the same rule, and with KV."""
    model = PerfModel(COSTS)
    assert NUM_BLOCKS * BLOCK_SIZE >= 21 * 150, "nodes ask their pool instead"
    size, num_tokens = len(contexts) + 1, sum(contexts) + newcomer
    max_batch = max(size + spare_rows, 1)
    assume(model.decode_s(1, newcomer) <= tpot_s)  # nodes do not try to keep the impossible
    assume(all(model.decode_s(1, tokens) <= tpot_s for tokens in contexts))
    step_s = model.decode_s(size, num_tokens)
    assume(abs(step_s - aimed_s(tpot_s)) > 1e-9)  # sums are rounded in different orders
    rule = has_place(size, max_batch, step_s, aimed_s(tpot_s))
    members = [request(tokens, tpot_s) for tokens in contexts]
    for name in ("tpot-cap", "slack-batch"):
        assert policy(name, max_batch).has_place(members, request(newcomer, tpot_s)) is rule

    nodes = Nodes()
    perf = PerfReport(step=COSTS, token_budget=BUDGET, max_batch_size=max_batch)
    slot = nodes.join("d", NodeRole.DECODE, perf).slot
    fleet, decodes, now_s = nodes.router.fleet, nodes.router._books.decodes, nodes.clock.now()
    for tokens in contexts:
        decodes.forecast.add(slot, now_s, now_s, now_s + 10.0, tokens)
    view = Newcomer(newcomer, newcomer, tpot_s).view(fleet, decodes, now_s)
    assert view.has_place(slot) is rule
    paces_s = np.empty(fleet.capacity)
    view.paces(0.0, 1000.0, paces_s)
    assert bool(paces_s[slot] < 1000.0) is rule
