"""What one seed stands for: a cluster, the requests that come, and what goes wrong when."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from msgspec.structs import replace

from pdserve.protocol import NodeRole
from pdserve.settings.config import EngineConfig, HandoffConfig, Mode, NodeConfig, PolicyConfig
from pdserve.settings.prefixes import PrefixConfig
from pdserve.settings.timeouts import Timeouts
from tests.lives.adapters import (
    FILES,
    INVOCATIONS,
    NAMES,
    NUM_BYTES,
    AdapterOrder,
    random_orders,
)
from tests.lives.clients import Call, random_call
from tests.lives.coordinator import ADDRESS
from tests.lives.faults import Fault, random_faults
from tests.lives.kv import BLOCK, POISON

TIMEOUTS = Timeouts(
    heartbeat_s=0.5,
    liveness_s=2.0,
    connect_s=1.0,
    drain_s=8.0,
    lease_s=5.0,
    transfer_s=4.0,
    prefix_s=2.0,
    ticket_s=6.0,
    request_s=120.0,
    resume_s=30.0,
)
FIRST_S = 1.0  # when the first request may come
ADAPTED = 0.4  # of all lives
DECLARED = 0.4  # of these: the settings name their adapters
EARLY = 0.3  # of calls there that name one: they come while nodes start
INVOKED = 0.5  # of prompts there: they have an aLoRA's invocation


@dataclass(frozen=True)
class PlannedNode:
    """A node of the cluster."""

    config: NodeConfig
    role: NodeRole
    num_blocks: int


@dataclass(frozen=True)
class Plan:
    """A whole life."""

    mode: Mode
    nodes: list[PlannedNode]
    calls: list[Call]
    faults: list[Fault]
    max_inflight: int
    is_two_sided: bool
    has_checksums: bool
    pulls_slowness: float
    orders: list[AdapterOrder] = field(default_factory=list)
    declared: dict[str, str] = field(default_factory=dict)  # adapters of the settings


def make_plan(seed: int, *, modes: tuple[Mode, ...], num_faults: int | None = None) -> Plan:
    """Draw a life."""
    random = Random(seed)
    mode = random.choice(modes)
    roles = _roles(random, mode)
    has_checksums = random.random() < 0.5
    policy = PolicyConfig(
        prefill_policy=random.choice(["fcfs-budget", "sjf-aging", "edf-slack", "buckets"]),
        decode_policy=random.choice(["max-batch", "tpot-cap", "slack-batch"]),
        kv_headroom=random.choice(["greedy", "reserve-static", "reserve-dynamic"]),
        prefill_chunk=random.choice([0, 8]),
    )
    engine = EngineConfig(
        block_size=BLOCK,
        token_budget=random.choice([16, 32, 64]),
        max_batch_size=random.choice([2, 4, 8]),
        prefix_cache=random.random() < 0.85,
    )
    prefix = PrefixConfig(prefix_pull=random.choice(["auto", "always", "never"]))
    handoff = HandoffConfig(announce_bytes=random.choice([1, 256, 1 << 20]))
    of_adapters = Random(seed + 3_000_000)
    has_adapters = of_adapters.random() < ADAPTED
    if has_adapters:
        engine = replace(
            engine,
            max_adapters=of_adapters.choice([1, 2, 8]),
            adapter_memory=of_adapters.choice([str(NUM_BYTES), str(2 * NUM_BYTES), "1GiB"]),
        )
    num_blocks = random.choice([60, 60, 80, 120])
    nodes = [
        PlannedNode(
            NodeConfig(
                node_id=f"n{number}",
                host=f"n{number}",
                port=7,
                coordinators=[ADDRESS],
                checksums=has_checksums,
                engine=engine,
                policy=policy,
                prefix=prefix,
                handoff=handoff,
                timeouts=TIMEOUTS,
            ),
            role,
            num_blocks,
        )
        for number, role in enumerate(roles)
    ]
    shared = [[random.randrange(POISON) for _ in range(n)] for n in (8, 20, 40)]
    calls = [
        random_call(random, number, FIRST_S + random.expovariate(1.5), shared)
        for number in range(random.randrange(4, 14))
    ]
    paths = dict(zip(NAMES, of_adapters.sample(list(FILES), len(NAMES)), strict=True))
    is_declared = has_adapters and of_adapters.random() < DECLARED
    invoked_at = of_adapters.choice([0, 2, 9])  # of all prompts, or those of others differ before
    for call in calls if has_adapters else ():
        call.name = of_adapters.choice(["", *NAMES, *NAMES])
        if is_declared and call.name and of_adapters.random() < EARLY:
            call.at_s = of_adapters.uniform(0.0, FIRST_S)
        if of_adapters.random() < INVOKED:
            token_ids = call.answers[0].request.prompt.token_ids  # of all of them
            token_ids.insert(invoked_at, INVOCATIONS["c" * 32][0])
    if random.random() < 0.08:
        for told in random.choice(calls).answers:
            told.request.prompt.token_ids.append(POISON)
    if num_faults is None:
        num_faults = random.choice([0, 1, 2, 2, 3, 4, 5])
    return Plan(
        mode=mode,
        nodes=nodes,
        calls=sorted(calls, key=lambda call: call.at_s),
        faults=random_faults(random, num_faults, len(roles), FIRST_S, has_checksums),
        max_inflight=random.choice([4, 100]),
        is_two_sided=random.random() < 0.5,
        has_checksums=has_checksums,
        pulls_slowness=random.choice([1.0, 1.0, 20.0]),
        orders=random_orders(of_adapters, FIRST_S, paths, is_declared=is_declared)
        if has_adapters
        else [],
        declared=paths if is_declared else {},
    )


def _roles(random: Random, mode: Mode) -> list[NodeRole]:
    num_decodes = random.choice([1, 2, 2, 3])
    if mode == "colocated":
        return [NodeRole.DECODE] * num_decodes
    return [NodeRole.PREFILL] * random.choice([1, 1, 2]) + [NodeRole.DECODE] * num_decodes
