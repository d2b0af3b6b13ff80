"""A router over members that a test plays, on a manual clock."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import structs

from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Member, Registry
from coordinator.routing import Booking, Placement, Router
from pdserve.kv import KvLayout
from pdserve.protocol import (
    KvEvents,
    KvTier,
    LoadReport,
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
from pdserve.settings.config import Mode, RouterName
from pdserve.shared.clock import ManualClock
from tests.fakes.hellos import LAYOUT, node_hello
from tests.fakes.outbox import RecordingOutbox

BLOCK_SIZE = LAYOUT.block_size
NUM_BLOCKS = 1000

# A millisecond a token, in steps of a hundred; a decode step costs a millisecond a request.
COSTS = StepCosts(knot_tokens=[1, 100], knot_s=[0.001, 0.1])
PERF = PerfReport(
    step=COSTS,
    token_budget=100,
    max_batch_size=10,
    transfers=[TransferCosts(transport="shm", fixed_s=0.001, bytes_per_s=1e9)],
)
# A step takes 10 ms and 0.2 for each token: large batches are cheap, and prompts disturb them.
BATCHES = structs.replace(
    PERF,
    step=StepCosts(knot_tokens=[1, 512], knot_s=[0.01, 0.112]),
    token_budget=512,
    max_batch_size=64,
)
NO_PROMISE = Slo()
EVERYWHERE = (TransportReach(name="tcp"),)


class Nodes:
    """Members, and the router that chooses among them."""

    def __init__(
        self,
        mode: Mode = "disaggregated",
        policy: RouterName = "predicted",
        perf: PerfReport = PERF,
        **pools: int,
    ) -> None:
        self.clock = ManualClock(100.0)
        self.registry = Registry()
        self.router = Router(self.registry, mode, policy, self.clock)
        self.prefill = [
            self.join(f"p{i}", NodeRole.PREFILL, perf) for i in range(pools.get("p", 0))
        ]
        self.decode = [self.join(f"d{i}", NodeRole.DECODE, perf) for i in range(pools.get("d", 0))]
        self._num_requests = 0

    def join(
        self,
        node_id: str,
        role: NodeRole,
        perf: PerfReport | None = PERF,
        host: str = "",
        transports: Sequence[TransportReach] = EVERYWHERE,
        revision: str = "r",
        *,
        late_last: bool = False,
        layout: KvLayout = LAYOUT,
        arithmetic: str = "",
    ) -> Member:
        """Without `host` on one of its own."""
        hello = node_hello(
            node_id,
            role,
            session_address=f"{host or node_id}:1",
            layout=layout,
            num_blocks=NUM_BLOCKS,
            late_last=late_last,
            max_model_len=4096,
            transports=list(transports),
            revision=revision,
            arithmetic=arithmetic,
        )
        member = self.registry.add(hello, RecordingOutbox())  # type: ignore[arg-type]
        if perf is not None:
            self.registry.profiled(member, perf)
        return member

    def report(self, member: Member, **fields: object) -> None:
        """It says how it is doing; nothing else is different."""
        load = LoadReport(state=NodeState.READY, role=member.role, free_blocks=NUM_BLOCKS)
        self.registry.report(member, msgspec.structs.replace(load, **fields))

    def holds(self, member: Member, token_ids: list[int], tier: KvTier = KvTier.POOL) -> None:
        chain = Prompt(token_ids).hashes(BLOCK_SIZE)
        self.router.prefixes.apply(member, KvEvents(tier=tier, stored=chain))

    def request(
        self,
        prompt: int | list[int] = 100,
        *,
        max_tokens: int = 11,
        slo: Slo = NO_PROMISE,
        priority: int = 0,
        revision: str = "",
    ) -> GenerationRequest:
        """With an answer as long as it may be, so that its length is known."""
        self._num_requests += 1
        token_ids = [self._num_requests, *range(prompt - 1)] if isinstance(prompt, int) else prompt
        return GenerationRequest(
            request_id=f"r{self._num_requests}",
            prompt=Prompt(token_ids),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            revision=revision,
            slo=msgspec.structs.replace(slo, priority=priority or slo.priority),
        )

    def place(self, prompt: int | list[int] = 100, **fields: object) -> Placement:
        """Where a request would go."""
        return self.router.place(self.request(prompt, **fields))  # type: ignore[arg-type]

    def send(self, prompt: int | list[int] = 100, **fields: object) -> Booking:
        """A request goes where the router says."""
        request = self.request(prompt, **fields)  # type: ignore[arg-type]
        return self.router.dispatched(request, self.router.place(request))


def send_to(nodes: Nodes, decode: Member, prompt: int, max_tokens: int) -> Booking:
    """A request that will decode at this node, ten milliseconds a token."""
    request = nodes.request(prompt, max_tokens=max_tokens)
    placement = structs.replace(nodes.router.place(request), decode=decode, tpot_s=0.010)
    return nodes.router.dispatched(request, placement)


def names(placement: Placement) -> tuple[str | None, str | None]:
    """(prefill node, decode node)."""
    prefill, decode = placement.prefill, placement.decode
    return prefill.node_id if prefill else None, decode.node_id if decode else None
