"""A deployment: how many nodes of each kind in which mode, run under a load."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

import msgspec

from pdserve.commands.bench.compare.cases import CompareCase
from pdserve.commands.bench.compare.goodput import RatePoint
from pdserve.commands.bench.compare.policies import PolicyContestant
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.bench.load.slo_score import Score
from pdserve.commands.simulation.call import Call
from pdserve.commands.simulation.cluster import Cluster
from pdserve.commands.simulation.coordinator import Coordinator
from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.host import Host, Service
from pdserve.commands.simulation.machine import Machine, scaled
from pdserve.commands.simulation.messages import Messages, Server
from pdserve.commands.simulation.node import Node
from pdserve.commands.simulation.outcome import Outcome
from pdserve.commands.simulation.predict.load import (
    Question,
    Ranged,
    call_of,
    calls_of,
    most_tokens,
)
from pdserve.commands.simulation.predict.parts import Parts
from pdserve.commands.simulation.predict.tally import Tally
from pdserve.commands.simulation.split import SplitCores
from pdserve.commands.simulation.step_times import ResidualScatter
from pdserve.measured.calibration import Calibration, Services, Sharing
from pdserve.protocol import NodeRole, Slo
from pdserve.settings.config import ONE_POOL, Mode, PolicyConfig, RoutingConfig

_APART_S = 1.0  # between two requests to an idle cluster


class Deployment(msgspec.Struct, frozen=True):
    """Nodes of each role, and the mode; co-located, all decode; multiplexed, two are one."""

    mode: Mode
    prefill: int
    decode: int
    policies: str = ""  # other ones than the mode has by itself, as in `pdserve bench compare`
    # `--quantization` of prefill nodes, if it is not that of decode nodes; empty: it is.
    prefill_weights: str = ""

    @property
    def num_nodes(self) -> int:
        """Nodes of both roles."""
        return self.prefill + self.decode

    @property
    def text(self) -> str:
        """For people: "disaggregated 1P2D", "colocated 3"."""
        if self.mode == "colocated":
            text = f"colocated {self.num_nodes}"
        else:
            text = f"{self.mode} {self.prefill}P{self.decode}D"
        if self.prefill_weights:
            text += f" (prefill {self.prefill_weights})"
        return f"{text} {self.policies}" if self.policies else text


@dataclass(frozen=True, slots=True)
class Rig:
    """What all simulations of an answer have in common."""

    calibration: Calibration
    policy: PolicyConfig
    ranges: Ranged
    one_host: bool  # all nodes share one memory bus
    admission: bool
    target: float
    slower: float = 1.0  # factor on the times of steps
    prefill: Calibration | None = None  # of nodes with other weights, for `prefill_weights`
    # Clients ask for just as many tokens as they get; else it is learned how many that will be.
    lengths_told: bool = False

    def of(self, deployment: Deployment, role: NodeRole) -> Calibration:
        """Return the calibration of a deployment's nodes of this role."""
        if role is NodeRole.PREFILL and deployment.prefill_weights and self.prefill is not None:
            return self.prefill
        return self.calibration

    def variants(self, deployment: Deployment) -> list[Deployment]:
        """Return a deployment, and that with other weights on its prefill nodes, if there are."""
        if self.prefill is None or deployment.mode != "disaggregated":
            return [deployment]
        weights = self.prefill.quantisation or "none"
        return [deployment, msgspec.structs.replace(deployment, prefill_weights=weights)]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One run: the score of `pdserve bench compare`, and what the nodes did."""

    rate: float
    score: Score
    seconds: float  # simulated
    cpu_s: float  # that the simulation took
    busy: dict[str, float]  # node |-> share of the time that it computed
    # Service |-> share of the time that it had something to do; none: the calibration has none.
    services: dict[str, float]
    prompt_busy: dict[str, float]  # node |-> the part of this that was for prompts
    client_kept_up: bool  # otherwise it, and no node, is what limits this run
    parts: Parts
    largest_batch: int
    in_flight: float  # requests that an arriving one found in the cluster, on average
    mean_e2e_s: float
    prompt_tokens: int  # of prompts that were computed: of calls that have a token
    cached_tokens: int  # of these, in the prefix cache
    output_tokens: int
    num_answers: int  # that ended
    off_tokens: dict[Literal["kind", "mean"], float]  # as `OutputLengths` has it, of these
    stopped_early: bool  # the target was out of reach: the rest was not simulated

    @property
    def point(self) -> RatePoint:
        """The point of the attainment curve."""
        return RatePoint(self.rate, self.score.counts)


def run(
    rig: Rig, deployment: Deployment, case: CompareCase, rate: float, count: int,
    promise: Promise, seed: int, until_s: float = inf, stop_s: float = inf,
) -> Result:  # fmt: skip
    """Simulate `count` requests of a workload at this rate, as far as they end by `until_s`.

    Those that would follow others later than `stop_s` are left out.

    Raises:
        CalibrationError: something lies outside of what was calibrated, and must not.
    """
    began_s = time.process_time()
    cluster, front = _cluster(rig, deployment, seed)
    tally = Tally(promise, _most_late(case, count, rig.target), cluster.events.stop)
    most = 0 if rig.lengths_told else most_tokens(rig.calibration)
    calls = calls_of(case, rate, count, promise, rig.ranges, most)
    cluster.run(front, calls, tally, until_s, stop_s)
    for outcome in cluster.unfinished():
        tally.note(outcome)
    seconds = cluster.events.now_s
    rig.ranges.check_batches([node.largest_batch for node in cluster.nodes])
    scored = tally.score(rig.target)
    late_ms = scored.late_ms.p99 or 0.0
    rig.ranges.check_client(rate, late_ms, promise)
    return Result(
        rate=rate,
        score=scored,
        seconds=seconds,
        cpu_s=time.process_time() - began_s,
        busy={node.name: node.busy_s / seconds for node in cluster.nodes},
        services={name: busy_s / seconds for name, busy_s in cluster.messages.busy_s.items()},
        prompt_busy={node.name: node.prompt_s / seconds for node in cluster.nodes},
        client_kept_up=promise.is_measured(late_ms),
        parts=tally.phases.parts(node.steps for node in cluster.nodes),
        largest_batch=max(node.largest_batch for node in cluster.nodes),
        in_flight=cluster.num_met / cluster.num_arrived,
        mean_e2e_s=cluster.call_seconds / max(1, scored.finished),
        prompt_tokens=tally.num_prompt_tokens,
        cached_tokens=tally.num_cached_tokens,
        output_tokens=tally.num_output_tokens,
        num_answers=front.router.lengths.num_answers,
        off_tokens=front.router.lengths.off_tokens,
        stopped_early=tally.stopped_early,
    )


def runs_of(
    rig: Rig, deployment: Deployment, question: Question, rate: float, promise: Promise,
    num_seeds: int, longer: float = 1.0,
) -> list[Result]:  # fmt: skip
    """Simulate a rate with several seeds, whose requests differ. Raises as `run`."""
    results = []
    for seed in range(num_seeds):
        case = question.case(rig.calibration, seed, longer)
        count = case.count_at(rate, question.count)
        results.append(run(rig, deployment, case, rate, count, promise, seed))
    return results


def idle_latencies(
    rig: Rig, deployment: Deployment, case: CompareCase, count: int, seed: int
) -> tuple[float, float]:
    """Return (the slowest TTFT, the median TPOT), in seconds, of requests sent one at a time."""
    cluster, front = _cluster(rig, deployment, seed)
    outcomes: list[Outcome] = []
    cluster.run(front, _one_by_one(rig, case, count), outcomes.append)
    tpots_s = sorted(outcome.tpot_s for outcome in outcomes)
    return max(outcome.ttft_s for outcome in outcomes), tpots_s[len(tpots_s) // 2]


def _one_by_one(rig: Rig, case: CompareCase, count: int) -> Iterable[Call]:
    perf, budget, at_s = (
        Machine.of(rig.calibration).perf(),
        rig.calibration.limits.token_budget,
        0.0,
    )
    for sketch in case.workload.sketched(1.0, count):
        rig.ranges.check(sketch)
        alone = replace(sketch, after=None)
        yield call_of(alone, at_s, case.workload.block_tokens, Slo())
        num_tokens = sketch.num_prompt + sketch.num_output
        alone_s = perf.prefill_s(sketch.num_prompt, 0, budget)
        alone_s += sketch.num_output * perf.decode_s(1, num_tokens)
        at_s += 2 * rig.slower * alone_s + _APART_S


def _cluster(rig: Rig, deployment: Deployment, seed: int) -> tuple[Cluster, Coordinator]:
    events = Events()
    places = _places(rig, deployment, events)
    calibrations = {role: rig.of(deployment, role) for role in NodeRole}
    machines = {role: _machine(rig, made) for role, made in calibrations.items()}
    policy, router = rig.policy, RoutingConfig().router
    if deployment.policies:
        contestant = PolicyContestant.parse(deployment.policies, deployment.mode)
        policy, router = contestant.policy(policy), contestant.chosen.get("router", router)
    num_prefill = 0 if deployment.mode in ONE_POOL else deployment.prefill
    roles = [NodeRole.PREFILL] * num_prefill
    roles += [NodeRole.DECODE] * (len(places) - num_prefill)
    if deployment.mode == "multiplexed":  # each node has the memory of two
        machines = {
            role: replace(one, num_kv_tokens=2 * one.num_kv_tokens)
            for role, one in machines.items()
        }
    nodes = [
        Node(
            f"{role.name.lower()}-{number}",
            role,
            machines[role],
            events,
            policy,
            host=host,
            cores=cores,
            scatter=ResidualScatter(calibrations[role].residuals, f"{seed} {number}"),
        )
        for number, (role, (host, cores)) in enumerate(zip(roles, places, strict=True))
    ]
    cluster = Cluster(events, nodes, _messages(rig, nodes, events))
    return cluster, Coordinator(cluster, deployment.mode, router, admission=rig.admission)


def _places(
    rig: Rig, deployment: Deployment, events: Events
) -> list[tuple[Host | None, SplitCores | None]]:
    """Return the host of each node, and its cores if it splits them."""
    bus, threads, num_nodes = rig.calibration.host, rig.calibration.cpus, deployment.num_nodes
    host = Host("shared", events, bus, threads) if rig.one_host else None
    if deployment.mode != "multiplexed":
        return [(host, None)] * num_nodes
    hosts = [host or Host(f"host-{n}", events, bus, threads) for n in range(deployment.decode)]
    machine = _machine(rig, rig.calibration)
    return [(host, SplitCores(events, host, machine, threads, bus, rig.policy)) for host in hosts]


def _messages(rig: Rig, nodes: Sequence[Node], events: Events) -> Messages:
    """Return the coordinator, and the client where all is on one host: where benchmarks have it."""
    times, sharing = rig.calibration.services, rig.calibration.host
    if times == Services():
        return Messages()
    if not rig.one_host:
        alone = Service(events, Host("coordinator", events, Sharing(cores=1)), [0])
        return Messages(Server(alone, times.coordinator))
    host = nodes[0].host
    coordinator = Service(events, host, host.spare_cores)
    client = Service(events, host, range(sharing.cores))
    return Messages(Server(coordinator, times.coordinator), Server(client, times.client))


def _machine(rig: Rig, calibration: Calibration) -> Machine:
    machine = Machine.of(calibration)
    if rig.slower == 1.0:
        return machine
    costs = {region: scaled(of, rig.slower) for region, of in machine.step_costs.items()}
    return replace(machine, costs=scaled(machine.costs, rig.slower), true_costs=costs)


def _most_late(case: CompareCase, count: int, target: float) -> Mapping[str, float]:
    """Return kind |-> how many may be late at most, of all that are sent.

    Nobody knows how many of each kind a trace has, so there it is as many as if all were alike.
    """
    kinds = case.scenario.kinds if case.scenario else ()
    late = {kind.name: (1 - target) * count * kind.cards / case.deck for kind in kinds}
    return late if kinds else defaultdict(lambda: (1 - target) * count)
