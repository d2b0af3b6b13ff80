"""Simulated nodes for measuring a router: registry entries with made-up reports."""

from __future__ import annotations

from random import Random

from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Member, Registry
from coordinator.routing import Router
from pdserve.kv import KvDtype, KvLayout
from pdserve.protocol import (
    KvEvents,
    KvTier,
    LoadReport,
    NodeHello,
    NodeRole,
    NodeState,
    PerfReport,
    Prompt,
    SamplingParams,
    Slo,
    StepCosts,
    TransferCosts,
    TransportReach,
)
from pdserve.protocol.requests import HASH_BYTES
from pdserve.settings.config import Mode, RouterName
from pdserve.wire.outbox import Outbox

BLOCK_SIZE = 16
_NUM_BLOCKS = 1 << 16  # in each node's pool
_NUM_PROFILES = 8  # kinds of machines
_HOLDERS = 16  # nodes that hold a part of a prompt, each of a different length
_SHARED_BLOCKS = 16  # at the beginning of every prompt, held by every fourth node
_EVENT_BLOCKS = 64  # per message of a node
_LAYOUT = KvLayout.gqa(
    layers=32, heads=8, head_dim=128, block_size=BLOCK_SIZE, dtype=KvDtype.BFLOAT16
)
_SLO = Slo(name="standard", ttft_s=10.0, tpot_s=0.25, priority=1)


class MadeUpNodes:
    """A registry full of members, with the reports that such nodes would send."""

    def __init__(self, num_nodes: int, nodes_per_host: int) -> None:
        self.registry = Registry()
        self._random = Random(0)
        self._nodes_per_host = nodes_per_host
        self.members = [self._join(number) for number in range(num_nodes)]

    def router(self, policy: RouterName, mode: Mode) -> Router:
        """Return a router over these members that has dispatched two requests per member."""
        router = Router(self.registry, mode, policy)
        for number in range(2 * len(self.members)):
            request = self.request(f"load-{number}", self.tokens(64 + self._random.randrange(2048)))
            booking = router.dispatched(request, router.place(request))
            if number % 2:
                booking.progressed(1)
        return router

    def request(self, request_id: str, token_ids: list[int]) -> GenerationRequest:
        """Return a request for this prompt."""
        sampling = SamplingParams(max_tokens=256)
        return GenerationRequest(
            request_id=request_id, prompt=Prompt(token_ids), sampling=sampling, slo=_SLO
        )

    def tokens(self, number: int) -> list[int]:
        """Return a random prompt."""
        return [self._random.randrange(100_000) for _ in range(number)]

    def kv_events(
        self, num_blocks: int, prompts: dict[tuple[int, float], list[int]]
    ) -> list[tuple[Member, KvEvents]]:
        """Return the members' messages for `num_blocks` cached blocks.

        Some members hold a part of each prompt, up to its share; the other blocks belong to prompts
        that are never requested.
        """
        messages: list[tuple[Member, KvEvents]] = []

        def hold(member: Member, hashes: list[bytes]) -> None:
            for first in range(0, len(hashes), _EVENT_BLOCKS):
                stored = hashes[first : first + _EVENT_BLOCKS]
                messages.append((member, KvEvents(tier=KvTier.POOL, stored=stored)))

        for (_, share), token_ids in prompts.items():
            if share == 0:
                continue
            chain = Prompt(token_ids).hashes(BLOCK_SIZE)
            most = int(len(chain) * share)
            holders = self._random.sample(self.members, min(_HOLDERS, len(self.members)))
            for number, member in enumerate(holders):
                hold(member, chain[: most - most * number // (2 * _HOLDERS)])
            for member in self.members[::4]:
                hold(member, chain[:_SHARED_BLOCKS])
        num_left = num_blocks - sum(len(events.stored) for _, events in messages)
        for number in range(0, max(num_left, 0), _EVENT_BLOCKS):
            names = [self._random.randbytes(HASH_BYTES) for _ in range(_EVENT_BLOCKS)]
            hold(self.members[number // _EVENT_BLOCKS % len(self.members)], names)
        return messages

    def _join(self, number: int) -> Member:
        chance = self._random
        role = NodeRole.PREFILL if number % 2 else NodeRole.DECODE
        host = number // self._nodes_per_host
        hello = NodeHello(
            node_id=f"node-{number}",
            incarnation=f"{number}-1",
            role=role,
            state=NodeState.READY,
            session_address=f"10.0.0.{host}:1",
            metrics_address=f"10.0.0.{host}:2",
            model_id="m",
            revision="r",
            layout=_LAYOUT,
            num_blocks=_NUM_BLOCKS,
            max_model_len=1 << 17,
            introduction_key=bytes(32),
            transports=[TransportReach(name="tcp")],
        )
        member = self.registry.add(hello, Outbox())
        slower = 1 + number % _NUM_PROFILES / 10
        knots = [1, 64, 256, 512, 2048]
        costs = StepCosts(
            knot_tokens=knots,
            knot_s=[slower * (0.008 + 0.00003 * knot) for knot in knots],
            sampled_s=1e-6,
            pair_s=1e-10,
            context_s=1e-8,
        )
        pulls = [TransferCosts(transport="ucx", fixed_s=0.002, bytes_per_s=2e10)]
        self.registry.profiled(
            member,
            PerfReport(step=costs, token_budget=2048, max_batch_size=256, transfers=pulls),
        )
        load = LoadReport(
            state=NodeState.READY,
            role=role,
            queued_tokens=chance.randrange(8192) if role is NodeRole.PREFILL else 0,
            running_requests=chance.randrange(64),
            free_blocks=_NUM_BLOCKS - chance.randrange(_NUM_BLOCKS // 2),
            prefill_ratio=chance.uniform(0.9, 1.1),
            decode_ratio=chance.uniform(0.9, 1.1),
        )
        self.registry.report(member, load)
        return member
