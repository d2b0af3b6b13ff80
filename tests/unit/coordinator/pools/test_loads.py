"""What reports come to, as shares of what was promised."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import inf

import pytest

from coordinator.admission.decisions import Reason
from coordinator.nodes.registry import Member, Registry
from coordinator.pools.loads import KV_SHARE, PoolLoads, decode_load
from coordinator.pools.rebalancer import LATE
from coordinator.routing.router import NodeOutlook
from coordinator.routing.sides import USUAL_TPOT_S, USUAL_TTFT_S
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import NodeRole, PerfReport, StepCosts, TransportReach
from pdserve.shared.clock import ManualClock
from tests.fakes.members import NUM_BLOCKS, join, report

P, D = NodeRole.PREFILL, NodeRole.DECODE
# 10 ms a step, 1 ms a token beyond the first.
PERF = PerfReport(
    step=StepCosts(knot_tokens=[1, 101], knot_s=[0.010, 0.110]), token_budget=101, max_batch_size=11
)


class Promises:
    def __init__(self) -> None:
        self.num_refused: Counter[Reason] = Counter()
        self.promises: tuple[float, float] | None = (2.0, 0.1)
        self.waited_s = 0.0  # in line

    def tightest(self, now_s: float) -> tuple[float, float] | None:
        return self.promises

    def longest_wait_s(self, now_s: float) -> float:
        return self.waited_s


class Bench:
    def __init__(self) -> None:
        self.registry = Registry()
        self.promises = Promises()
        self.queues_s: defaultdict[str, float] = defaultdict(float)  # by node id
        self.pace_share = 1.0
        self.loads = PoolLoads(self.registry, self.promises, self._outlook, ManualClock())

    def _outlook(self, member: Member) -> NodeOutlook:
        return NodeOutlook(self.queues_s[member.node_id], 0.01, self.pace_share)

    def join(self, node_id: str, role: NodeRole, perf: PerfReport | None = PERF) -> Member:
        member = join(self.registry, node_id, role)
        if perf is not None:
            self.registry.profiled(member, perf)
        return member

    def by_node(self) -> dict[str, float | None]:
        return {node.node_id: node.load for node in self.loads.look()}


def test_a_queue_of_prompts_is_measured_in_time_to_first_token() -> None:
    bench = Bench()
    bench.join("p", P)
    bench.queues_s["p"] = 1.1
    assert bench.by_node() == {"p": pytest.approx(1.1 / 2)}
    bench.promises.promises = (0.5, inf)
    assert bench.by_node() == {"p": pytest.approx(1.1 / 0.5)}


def test_the_load_of_a_pool_is_shown() -> None:
    bench = Bench()
    metrics = CoordinatorMetrics()
    bench.loads.watch(metrics)
    for name, queue_s in (("p0", 1.0), ("p1", 3.0)):
        bench.join(name, P)
        bench.queues_s[name] = queue_s
    assert metrics.registry.get_sample_value("pdserve_prefill_pool_load") == 1.0
    assert metrics.registry.get_sample_value("pdserve_decode_pool_load") == 0.0


def test_a_batch_is_measured_in_time_between_tokens() -> None:
    bench = Bench()
    member = bench.join("d", D)
    full = {"free_blocks": NUM_BLOCKS}
    report(bench.registry, member, D, running_requests=6, **full)
    assert decode_load(member, 0.1) == pytest.approx(0.015 / 0.1)
    report(bench.registry, member, D, running_requests=6, waiting_requests=5, **full)
    assert decode_load(member, 0.1) == pytest.approx(0.020 / 0.1), "as if they were let in"
    report(bench.registry, member, D, running_requests=11, waiting_requests=11, **full)
    assert decode_load(member, 0.1) == pytest.approx(2 * 0.020 / 0.1), "two batches in turns"
    assert decode_load(member, 0.1 / 4) == pytest.approx(4 * 2 * 0.020 / 0.1)


def test_tokens_that_are_guessed_take_no_step_of_their_own() -> None:
    """As many streams as run now get them; of further ones nothing is known."""
    bench = Bench()
    member = bench.join("d", D)
    report(bench.registry, member, D, running_requests=4, free_blocks=NUM_BLOCKS)
    plain = bench.loads.demands([D])[D]
    assert bench.by_node() == {"d": pytest.approx(0.013 / 0.1)}
    bench.pace_share = 0.5
    assert bench.by_node() == {"d": pytest.approx(0.0065 / 0.1)}
    guessed = bench.loads.demands([D])[D]
    assert guessed.load_with(1) == pytest.approx(plain.load_with(1) / 2)
    assert guessed.load_with(2) == pytest.approx(plain.load_with(2) / 2, rel=0.1)
    more = decode_load(member, 0.1, 1.2)
    assert more * 0.8 < decode_load(member, 0.1, 1.2, 0.8) < more
    waiting = {"running_requests": 4, "waiting_requests": 4, "free_blocks": NUM_BLOCKS}
    report(bench.registry, member, D, **waiting)
    assert decode_load(member, 0.1, 1.0, 0.5) == pytest.approx(0.017 / 1.5 / 0.1)


def test_blocks_in_use_count_as_well_as_time() -> None:
    bench = Bench()
    member = bench.join("d", D)
    report(bench.registry, member, D, running_requests=2, free_blocks=NUM_BLOCKS // 4)
    assert decode_load(member, inf) == pytest.approx(0.75 / KV_SHARE)
    report(
        bench.registry,
        member,
        D,
        running_requests=2,
        waiting_requests=1,
        free_blocks=NUM_BLOCKS // 4,
    )
    assert decode_load(member, inf) == pytest.approx(1.5 * 0.75 / KV_SHARE)


def test_an_idle_node_has_no_load() -> None:
    bench = Bench()
    member = bench.join("d", D)
    report(bench.registry, member, D, free_blocks=0, step_time_s=3.0)  # of long ago
    assert decode_load(member, 0.1) == 0.0


def test_where_nothing_is_promised_usual_latencies_count() -> None:
    bench = Bench()
    bench.promises.promises = None
    prefill, decode = bench.join("p", P), bench.join("d", D)
    bench.queues_s[prefill.node_id] = 1.5
    report(bench.registry, decode, D, running_requests=11, free_blocks=NUM_BLOCKS)
    loads = {"p": 1.5 / USUAL_TTFT_S, "d": 0.020 / USUAL_TPOT_S}
    assert bench.by_node() == pytest.approx(loads)
    bench.promises.waited_s = 20.0
    assert bench.by_node() == pytest.approx(loads | {"p": 21.5 / USUAL_TTFT_S}), "before a node"
    bench.promises.promises = (2.0, 0.1)
    assert bench.by_node()["p"] == pytest.approx(1.5 / 2.0), "nobody in line was promised anything"


def test_who_was_refused_stands_in_no_queue_but_counts() -> None:
    bench = Bench()
    bench.join("p", P)
    report(bench.registry, bench.join("d", D), D, free_blocks=NUM_BLOCKS)
    bench.promises.num_refused["ttft"] += 1
    assert bench.by_node() == {"p": LATE, "d": 0.0}
    assert bench.by_node() == {"p": 0.0, "d": 0.0}, "since the last look"
    bench.promises.num_refused["tpot"] += 4
    bench.promises.num_refused["waiting"] += 4
    assert bench.by_node() == {"p": 0.0, "d": LATE}


def test_looking_at_a_pool_takes_nothing_from_the_next_look() -> None:
    bench = Bench()
    bench.join("p", P)
    bench.promises.num_refused["ttft"] += 1
    assert bench.loads.of(P) == 0.0
    assert bench.by_node() == {"p": LATE}


def test_of_some_nothing_is_known() -> None:
    bench = Bench()
    bench.join("p", P, perf=None)
    assert bench.by_node() == {"p": None}
    assert bench.loads.of(P) == 0.0
    assert bench.loads.of(D) == 0.0


def test_what_a_node_would_take_along() -> None:
    bench = Bench()
    report(bench.registry, bench.join("p", P), P, queued_tokens=70)
    report(bench.registry, bench.join("d", D), D, running_requests=3, waiting_requests=2)
    join(bench.registry, "bound", D, prefill_refusal="its memory is private")
    nodes = {node.node_id: node for node in bench.loads.look()}
    assert (nodes["p"].left_over, nodes["d"].left_over) == (70, 5)
    assert [node.may_turn for node in nodes.values()] == [True, True, False]


def test_the_only_partner_of_the_other_pool_stays() -> None:
    bench = Bench()
    shm, tcp = ([TransportReach(name=name)] for name in ("shm", "tcp"))

    def may_turn() -> list[bool]:
        return [node.may_turn for node in bench.loads.look()]

    join(bench.registry, "p0", P, transports=shm)
    join(bench.registry, "p1", P, transports=tcp)
    join(bench.registry, "d0", D, transports=shm)
    assert may_turn() == [False, True, True], "without p0, p1 and d0 share nothing"
    join(bench.registry, "p2", P, transports=shm)
    assert may_turn() == [True, True, True, True]
