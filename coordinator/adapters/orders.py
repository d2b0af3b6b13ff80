"""Orders to nodes to load adapters, and their answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import count
from typing import Final

from coordinator.nodes.registry import Member, Registry
from pdserve.protocol import AdapterLoaded, LoadAdapter, UnloadAdapter
from pdserve.shared.errors import DeadlineExceeded, NodeLost, PdserveError, from_code

LOAD_S: Final = 120.0  # in which a node has loaded an adapter, or will not


@dataclass(frozen=True, slots=True)
class _Order:
    member: Member
    answer: asyncio.Future[AdapterLoaded]
    timer: asyncio.TimerHandle


class AdapterOrders:
    """The orders of one coordinator that nodes have not answered yet."""

    def __init__(self, registry: Registry, load_s: float = LOAD_S) -> None:
        self._registry = registry
        self._load_s = load_s
        self._ids = count()
        self._open: dict[str, _Order] = {}
        registry.on_lost(self._lost)

    async def load(self, member: Member, path: str, digest: str = "") -> AdapterLoaded:
        """Have a node load the adapter in a folder of its, and return what it has loaded.

        `digest`: that it must have; empty: any.

        Raises:
            NodeLost: the node is gone.
            DeadlineExceeded: it has not loaded it in time.
            PdserveError: why it cannot, by its own account.
        """
        if member not in self._registry:  # it went between the choice and now
            raise NodeLost(f"{member.node_id} is gone")
        order_id, loop = str(next(self._ids)), asyncio.get_running_loop()
        answer: asyncio.Future[AdapterLoaded] = loop.create_future()
        late = DeadlineExceeded(f"{member.node_id} has not loaded {path} in {self._load_s:g} s")
        timer = loop.call_later(self._load_s, self._fail, order_id, late)
        self._open[order_id] = _Order(member, answer, timer)
        member.send(LoadAdapter(order_id=order_id, path=path, digest=digest))
        try:
            loaded = await answer
        finally:
            timer.cancel()
            self._open.pop(order_id, None)
        if loaded.code:
            raise from_code(loaded.code, f"{member.node_id}: {loaded.message}")
        return loaded

    def unload(self, digest: str) -> None:
        """Have all nodes keep an adapter no longer for this coordinator."""
        for member in self._registry:
            if member.most_adapters:  # it may keep one that it has not loaded
                member.send(UnloadAdapter(digest=digest))

    def answered(self, message: AdapterLoaded, member: Member) -> None:
        """Note a node's answer; one to an order that is given up counts for nothing."""
        order = self._open.get(message.order_id)
        if order is not None and order.member is member and not order.answer.done():
            order.answer.set_result(message)

    def _lost(self, member: Member) -> None:
        for order_id, order in list(self._open.items()):
            if order.member is member:
                self._fail(order_id, NodeLost(f"{member.node_id} is gone"))

    def _fail(self, order_id: str, error: PdserveError) -> None:
        order = self._open.get(order_id)
        if order is not None and not order.answer.done():
            order.answer.set_exception(error)
