"""The later hosts of a node, as the node sees them.

There are two connections to each: one for steps, of the engine's thread, and one for KV, of the
event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_transfer.exporter import Exporter
from kv_transfer.hosts.far_host import Exported, FarHost
from kv_transfer.sharded_pool import ShardedPool
from kv_transfer.transports.sockets import send_all
from pdserve.engine.ranks.hosts import HostShare
from pdserve.node.device_hosts.messages import DeviceHostStep, HostResult
from pdserve.node.rank_hosts.connecting import CONNECT_S, connect
from pdserve.node.rank_hosts.messages import SECRET_BYTES, DevicesOrder, HostOrder
from pdserve.node.rank_hosts.stream import HostStream
from pdserve.node.start.model import NodeModel
from pdserve.protocol import Sickness, TransportOffer
from pdserve.protocol.version import PROTOCOL
from pdserve.shared.addresses import split_address
from pdserve.shared.clock import Clock
from pdserve.shared.errors import NodeSick, PeerLost
from pdserve.wire.security import Security

log = logging.getLogger(__name__)

_REASON_S: Final = 1.0  # for a host that hangs up to have said why


@dataclass(frozen=True, slots=True)
class KvSettings:
    """What of a node's settings counts for the parts of its pool on all hosts."""

    transports: Sequence[str]
    kv_port: int
    links: Sequence[str]
    tier_blocks: int  # slots of the host tier


class LaterHosts:
    """All of them. Implements StepFollowers. Steps and loading belong to the engine's thread."""

    def __init__(
        self, model: NodeModel, store: str, security: Security, *, shares_kv: bool
    ) -> None:
        """Nothing is sent yet.

        Args:
            model: as planned, for the first host.
            store: host:port where the ranks meet.
            security: of the connections.
            shares_kv: KV moves to and from this node.
        """
        tls_dir = "" if security.tls_dir is None else str(security.tls_dir)
        self._hosts: list[LaterHost] = []
        share, layouts = model.share, model.rank_layouts
        for address in model.share.later_hosts:
            share = share.next()
            secret = secrets.token_bytes(SECRET_BYTES) if shares_kv else b""
            order = _order(model, share, store, security, address, secret)
            kv = FarHost(address, sum(layouts[rank].block_bytes for rank in share.ranks))
            self._hosts.append(LaterHost(address, order, tls_dir, model.config.hidden_size, kv))
        self.kv = [host.kv for host in self._hosts] if shares_kv else []

    @property
    def lost(self) -> str:
        """Which one is lost, and how; empty: none is."""
        return next((host.lost for host in self._hosts if host.lost), "")

    def begin(self, on_wait: Callable[[], None]) -> None:
        """Have all of them load their ranks; `on_wait` is called now and then, and may raise.

        Raises:
            NodeSick: one is not there.
        """
        for host in self._hosts:
            host.begin(on_wait)

    def begin_step(self, step: NDArray[np.uint8]) -> None:
        """As StepFollowers.begin_step."""
        for host in self._hosts:
            host.send(step)

    def end_step(self) -> NDArray[np.float32]:
        """As StepFollowers.end_step."""
        states = [host.receive() for host in self._hosts]
        return next((some for some in states if len(some)), states[0])

    async def share_kv(
        self,
        exporter: Exporter,
        pool: ShardedPool,
        settings: KvSettings,
        clock: Clock,
    ) -> None:
        """Have them do what is to be done with their parts of the pool. They have been begun with.

        Args:
            exporter: the node's, which serves already.
            pool: the node's.
            settings: which count there, too.
            clock: of tickets.

        Raises:
            NodeSick: one is lost.
            PdserveError: one cannot do it.
        """
        exported = Exported(
            node_id=exporter.node_id,
            incarnation=exporter.incarnation,
            identity=exporter.identity,
            ticket_key=exporter.ticket_key,
            transports=settings.transports,
            kv_port=settings.kv_port,
            links=settings.links,
        )
        begin = partial(
            LaterHost.begin_kv,
            exported=exported,
            pool=pool,
            tier_blocks=settings.tier_blocks,
            clock=clock,
        )
        for offers in await asyncio.gather(*(begin(host) for host in self._hosts)):
            exporter.offers += offers

    async def leave_kv(self) -> None:
        """Nothing is done with their parts any more."""
        for host in self.kv:
            await host.close()

    def close(self) -> None:
        """Leave them: they wait for another node. Nothing may be computing."""
        for host in self._hosts:
            host.close()


class LaterHost:
    """One of them. A thread notices its end also between steps."""

    def __init__(
        self, address: str, order: HostOrder, tls_dir: str, hidden_size: int, kv: FarHost
    ) -> None:
        self.kv = kv
        self._lost = ""
        self._address = address
        self._order = order
        self._tls_dir = tls_dir
        self._hidden_size = hidden_size
        self._stream: HostStream | None = None
        self._talking = threading.Lock()  # of the engine's thread and the watcher
        self._is_closing = False
        self._watcher = threading.Thread(target=self._watch, name="later-host", daemon=True)

    def begin(self, on_wait: Callable[[], None]) -> None:
        """Connect, and have it load its ranks. Raises as LaterHosts.begin."""
        try:
            sock = asyncio.run(connect(self._address, self._tls_dir, on_wait))
            self._stream = HostStream(sock)
            self._watcher.start()
            with self._talking:
                self._stream.send(self._order)
        except PeerLost as error:
            raise self._fail(error) from error

    @property
    def lost(self) -> str:
        """How it was lost; empty: it was not."""
        if self._lost or not self.kv.lost:
            return self._lost
        return f"host {self._address}: {self.kv.lost}"

    async def begin_kv(
        self, exported: Exported, pool: ShardedPool, tier_blocks: int, clock: Clock
    ) -> list[TransportOffer]:
        """As LaterHosts.share_kv."""
        assert self._order.devices is not None
        connecting = connect(self._address, self._tls_dir)
        try:
            async with asyncio.timeout(CONNECT_S):
                sock = await asyncio.to_thread(asyncio.run, connecting)
                sock.setblocking(False)
                await send_all(sock, self._order.devices.secret)
        except OSError as error:
            raise self._fail(PeerLost(f"the connection broke: {error}")) from error
        except PeerLost as error:
            raise self._fail(error) from error
        pool.follow_bumps(lambda ids: self.kv.bumped(ids, pool.generations))
        try:
            return await self.kv.begin(sock, exported, pool.generations, tier_blocks, clock)
        except PeerLost as error:  # which names the host
            raise NodeSick(f"{Sickness.RANK_LOST}: {error}") from error

    def send(self, step: NDArray[np.uint8]) -> None:
        """Send it a step. Raises NodeSick."""
        try:
            with self._talking:
                self._talk().send(DeviceHostStep(len(step), self.kv.num_bumps), step)
        except PeerLost as error:
            raise self._fail(error) from error

    def receive(self) -> NDArray[np.float32]:
        """Wait until the step has been computed; returns its states. Raises NodeSick."""
        try:
            with self._talking:
                stream = self._talk()
                result = stream.receive(HostResult)
                result.check()
                states = np.empty((result.num_states, self._hidden_size), np.float32)
                stream.receive_array(states)
                return states
        except PeerLost as error:
            raise self._fail(error) from error

    def close(self) -> None:
        """As LaterHosts.close."""
        self._is_closing = True
        if self._stream is not None:
            self._stream.close()
            self._watcher.join()

    def _talk(self) -> HostStream:
        if self.lost or self._stream is None:
            raise PeerLost(self.lost or "it has not been begun with")
        return self._stream

    def _watch(self) -> None:
        assert self._stream is not None
        self._stream.wait_hung_up()
        with self._talking:
            if self._is_closing or self._lost:
                return
            try:
                self._stream.receive(HostResult, within_s=_REASON_S).check()
                self._fail(PeerLost("it closed the connection"))
            except PeerLost as error:
                self._fail(error)

    def _fail(self, error: PeerLost) -> NodeSick:
        if not self.lost:
            self._lost = f"host {self._address}: {error}"
            log.error("lost %s", self._lost)
        return NodeSick(f"{Sickness.RANK_LOST}: {self.lost}")


def _order(
    model: NodeModel, share: HostShare, store: str, security: Security, address: str, secret: bytes
) -> HostOrder:
    return HostOrder(
        protocol=PROTOCOL,
        token=security.token,
        model_id=model.checkpoint.model_id,
        revision=model.checkpoint.revision,
        part=share,
        layout=model.layout,
        num_blocks=model.num_blocks,
        quantization=model.form.quantization,
        activations=model.activations.value,
        kernels="",
        devices=DevicesOrder(
            kind=model.device.type,
            attention=model.attention,
            has_graphs=model.has_graphs,
            worst_step=model.worst_step,
            store=store,
            advertised=split_address(address)[0],
            secret=secret,
        ),
    )
