"""A cluster whose nodes load adapters as a test says, and the adapters of its model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial

import msgspec

from coordinator.adapters.generator import AdaptedGenerator
from coordinator.adapters.known import Version
from coordinator.adapters.life import Adapters, Serving
from coordinator.adapters.orders import AdapterOrders
from coordinator.admission import Admission, WaitingLine
from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Member, Registry
from coordinator.requests.running import RunningRequest
from coordinator.routing import Router
from pdserve.protocol import (
    AdapterLoaded,
    AdapterReport,
    DecodeLeg,
    FinishReason,
    LoadAdapter,
    NodeRole,
    PrefillLeg,
    Prompt,
    SamplingParams,
    TokenBatch,
    TokenEvent,
    UnloadAdapter,
)
from pdserve.settings.config import Mode
from pdserve.shared.clock import ManualClock
from tests.fakes.hellos import node_hello
from tests.fakes.members import NO_GAP, made_flow

PREFILL, DECODE = NodeRole.PREFILL, NodeRole.DECODE
FILES = {"/a": "a" * 32, "/b": "b" * 32}  # path |-> digest of what is there
NUM_BYTES = 1000


@dataclass
class PlayedNode:
    """A node that carries orders out at once, or keeps them; it is its own outbox."""

    cluster: PlayedCluster
    files: dict[str, str]
    most: int = 8
    waits: bool = False  # with what it is ordered
    has: list[str] = field(default_factory=list)
    orders: list[LoadAdapter] = field(default_factory=list)
    legs: list[PrefillLeg | DecodeLeg] = field(default_factory=list)
    errors: dict[str, tuple[str, str]] = field(default_factory=dict)  # by path
    member: Member | None = None

    def send(self, message: msgspec.Struct) -> None:
        match message:
            case LoadAdapter():
                self.orders.append(message)
                if not self.waits:
                    asyncio.get_running_loop().call_soon(self.carry_out)
            case UnloadAdapter(digest=digest):
                self.has[:] = [one for one in self.has if one != digest]
                asyncio.get_running_loop().call_soon(self.report)
            case PrefillLeg() | DecodeLeg():
                assert message.prompt.adapter in ("", *self.has), "it would be refused"
                self.legs.append(message)

    def carry_out(self) -> None:
        """Do what it was ordered, and say so, unless it is gone."""
        orders, self.orders = self.orders, []
        for order in orders:
            answer = self._loaded(order)
            if self.member in self.cluster.registry:
                assert self.member is not None
                self.cluster.orders.answered(answer, self.member)

    def report(self) -> None:
        if self.member is not None and self.member in self.cluster.registry:
            report = AdapterReport(digests=self.has, most=self.most)
            self.cluster.registry.has_adapters(self.member, report)

    def _loaded(self, order: LoadAdapter) -> AdapterLoaded:
        code, text = self.errors.get(order.path, ("", ""))
        digest = self.files.get(order.path, "")
        if not code and (not digest or order.digest not in ("", digest)):
            code, text = "adapter_refused", "other files"
        if code:
            return AdapterLoaded(order_id=order.order_id, code=code, message=text)
        if digest not in self.has:
            self.has.append(digest)
            self.report()
        return AdapterLoaded(order_id=order.order_id, digest=digest, num_bytes=NUM_BYTES)


class PlayedCluster:
    """The adapters of the model "m" over nodes that are played."""

    def __init__(
        self, mode: Mode = "disaggregated", declared: dict[str, str] | None = None
    ) -> None:
        self.clock = ManualClock(1000.0)
        self.registry = Registry()
        self.router = Router(self.registry, mode, "predicted", self.clock)
        self.orders = AdapterOrders(self.registry, load_s=5.0)
        self.files = dict(FILES)
        self.adapters = Adapters(
            Serving(self.registry, partial(self.router.can_route, ""), self._uses),
            self.orders,
            self.clock,
            {"m"}.__contains__,
            declared or {},
        )
        self.flow = made_flow(
            self.registry,
            self.router,
            Admission(WaitingLine[RunningRequest](8), max_inflight=8),
            clock=self.clock,
            times=NO_GAP,
            adapter_missing=self.adapters.missing,
        )

    def _uses(self, digest: str) -> bool:
        return self.flow.uses(digest)

    def join(self, node_id: str, role: NodeRole, **fields: object) -> PlayedNode:
        node = PlayedNode(self, self.files, **fields)  # type: ignore[arg-type]
        node.member = self.registry.add(node_hello(node_id, role), node)  # type: ignore[arg-type]
        node.report()
        return node

    def pair(self) -> tuple[PlayedNode, PlayedNode]:
        return self.join("p", PREFILL), self.join("d", DECODE)

    def leave(self, node: PlayedNode) -> None:
        assert node.member is not None
        self.registry.remove(node.member)

    def start(self, version: Version | None, request_id: str = "r", **fields: object):
        request = GenerationRequest(
            request_id=request_id,
            prompt=Prompt([1, 2, 3]),
            sampling=SamplingParams(max_tokens=4),
            **fields,  # type: ignore[arg-type]
        )
        if version is None:
            return self.flow.start(request)
        return AdaptedGenerator(self.flow, version, self.adapters.begin).start(request)

    def say(self, node: PlayedNode, request_id: str, first: int, end: int) -> None:
        """The node's tokens `first` to `end`; the last of 4 ends the request."""
        assert node.member is not None
        for i in range(first, end):
            finish = FinishReason.LENGTH if i == 3 else None
            event = TokenEvent(
                request_id=request_id, index=i, token_ids=[100 + i], finish_reason=finish
            )
            self.flow.tokens(TokenBatch(events=[event]), node.member)


async def settle() -> None:
    """All that follows from what was said."""
    for _ in range(12):
        await asyncio.sleep(0)
