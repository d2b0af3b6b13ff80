"""The coordinator's end of the node streams: a hello, then all further messages of the node."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import grpc.aio
import msgspec
from google.protobuf.message import DecodeError

from coordinator.adapters.orders import AdapterOrders
from coordinator.nodes.registry import Member, Registry
from coordinator.nodes.revisions import Revisions
from coordinator.requests.flow import Flow
from pdserve.protocol import (
    AdapterLoaded,
    AdapterReport,
    Claimed,
    DrainSeen,
    KvEvents,
    LegFailed,
    LoadReport,
    NodeHello,
    NodeState,
    PerfReport,
    Prefetched,
    TokenBatch,
    Welcome,
)
from pdserve.protocol.version import check_protocol
from pdserve.settings.timeouts import SharedTimeouts
from pdserve.shared.errors import (
    AlreadyAttached,
    ConfigError,
    MalformedMessage,
    NodeIdTaken,
    PdserveError,
)
from pdserve.shared.introduction import check_key
from pdserve.wire import coordinator_pb2_grpc
from pdserve.wire.coordinator_pb2 import CoordinatorMessages, NodeMessages
from pdserve.wire.envelopes import FROM_COORDINATOR, FROM_NODE
from pdserve.wire.lifeline import caller, lifeline
from pdserve.wire.outbox import Outbox, running
from pdserve.wire.patience import patience

log = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext[NodeMessages, CoordinatorMessages]


class NodesOfModel(Protocol):
    """The nodes of one model (`coordinator/models/cluster.py`)."""

    @property
    def model_id(self) -> str:
        """The checkpoint's: that of each of its nodes."""
        ...

    @property
    def registered_name(self) -> str:
        """Its name in the file of models, which its nodes say; empty: it is of none."""
        ...

    @property
    def registry(self) -> Registry:
        """Its nodes."""
        ...

    @property
    def flow(self) -> Flow:
        """The requests on them."""
        ...

    @property
    def adapter_orders(self) -> AdapterOrders:
        """What its nodes were asked to load."""
        ...

    @property
    def revisions(self) -> Revisions:
        """Which of the model's revisions are served."""
        ...


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServicer):
    """gRPC service for nodes: one `Attach` call is the membership of one incarnation of a node."""

    def __init__(
        self, clusters: Sequence[NodesOfModel], welcome: Welcome, timeouts: SharedTimeouts
    ) -> None:
        """`clusters`: of the models that are served, one each. A node joins that of its model."""
        self._clusters = clusters
        self._welcome = welcome
        self._timeouts = timeouts

    def refused(self, node_id: str, reason: str) -> None:
        """Tell that a node is not let in. Its model may be unknown, so all clusters are told."""
        for cluster in self._clusters:
            cluster.registry.refused(node_id, reason)

    async def Attach(self, request_iterator: object, context: Context) -> None:  # noqa: N802
        """Serve a node until its stream breaks or it counts as lost (`_listen`)."""
        node_id = ""
        try:
            hello = await self._hello(context)
            node_id = hello.node_id
            cluster = self.checked(hello)
        except AlreadyAttached as error:  # no fault, so nothing is logged
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        except NodeIdTaken as error:  # the node logs it, and tries again soon
            self.refused(node_id, error.message)
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, error.message)
        except PdserveError as error:
            log.warning("refused a node: %s", error)
            self.refused(node_id, error.message)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        else:
            await self._serve(hello, cluster, context)

    async def _serve(self, hello: NodeHello, cluster: NodesOfModel, context: Context) -> None:
        try:
            await self._attached(hello, cluster, context)
        except MalformedMessage as error:
            log.warning("%s: %s", hello.node_id, error)
            # It is no member any more. If it hangs, the stream ends when it reads again, or when
            # its connection breaks.
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)

    async def _attached(self, hello: NodeHello, cluster: NodesOfModel, context: Context) -> None:
        """Serve a member until it is none any more. Raises as `_listen`."""
        outbox = Outbox()
        outbox.send(self._welcome)
        member = cluster.registry.add(hello, outbox)  # no await since the check
        try:
            async with running(outbox.pump(context, FROM_COORDINATOR)):
                await self._listen(member, cluster, context)
        finally:
            cluster.registry.remove(member)

    async def _listen(self, member: Member, cluster: NodesOfModel, context: Context) -> None:
        """Handle messages until the node hangs up or has attached anew.

        Raises:
            MalformedMessage: a message makes no sense, or none came for `liveness_s`, or for longer
                while the node's host and process still answered.
        """
        liveness_s, registry = self._timeouts.liveness_s, cluster.registry
        with lifeline(liveness_s, caller(context.peer())) as line:

            def waits_on(silent_s: float) -> bool:
                registry.silent(member, silent_s)
                return line.holds(silent_s)

            try:
                async with patience(liveness_s, waits_on=waits_on) as silence:
                    while (proto := await _read(context)) is not None and member in registry:
                        silence.heard()
                        registry.heard(member)
                        for message in FROM_NODE.unwrap_all(proto):
                            self._receive(message, member, cluster)
            except TimeoutError as error:
                raise _heard_nothing(liveness_s) from error

    def _receive(self, message: msgspec.Struct, member: Member, cluster: NodesOfModel) -> None:
        flow, registry = cluster.flow, cluster.registry
        match message:
            case TokenBatch():
                flow.tokens(message, member)
            case LoadReport():
                message.check()
                registry.report(member, message)
                if message.state is NodeState.DRAINING:
                    member.send(DrainSeen())
                elif message.state is NodeState.SICK:
                    log.error("%s is sick: %s", member.node_id, message.reason)
            case PerfReport():
                message.check()
                registry.profiled(member, message)
            case LegFailed():
                flow.leg_failed(message, member)
            case Claimed():
                flow.claimed(message, member)
            case Prefetched():
                flow.prefetched(message, member)
            case KvEvents():
                flow.kv_events(message, member)
            case AdapterReport():
                message.check()
                registry.has_adapters(member, message)
            case AdapterLoaded():
                cluster.adapter_orders.answered(message, member)
            case other:
                raise MalformedMessage(f"a node cannot send {type(other).__name__} after its hello")

    def checked(self, hello: NodeHello) -> NodesOfModel:
        """Return the cluster of a node that may be a member.

        Raises a PdserveError that says why it may not.
        """
        check_protocol(hello.protocol, hello.node_id)
        hello.layout.check()
        check_key(hello.introduction_key)
        cluster = self._cluster_of(hello)
        for other in self._clusters:  # a node may have been another model's before
            _check_id(hello, other.registry)
            self._check_way(hello, other.registry)
        cluster.revisions.check(hello)
        return cluster

    def _cluster_of(self, hello: NodeHello) -> NodesOfModel:
        """Return the cluster of a node's model: by its name, or where its revision has a share.

        Raises:
            ConfigError: it is not served here.
        """
        named = [c for c in self._clusters if c.registered_name == hello.model_name != ""]
        found = [c for c in named or self._clusters if c.model_id == hello.model_id]
        if not found:
            found = [c for c in named or self._clusters if _shares(c, hello)]
        if len(found) == 1:
            return found[0]
        if named or found:
            said = repr(hello.model_name) if hello.model_name else "no name"
            raise ConfigError(
                f"{hello.node_id} has {hello.model_id!r} under {said}, which is not what this "
                "coordinator's file of models says: start both with the same --models"
            )
        served = ", ".join(repr(cluster.model_id) for cluster in self._clusters)
        raise ConfigError(
            f"{hello.node_id} serves {hello.model_id!r}, this coordinator {served}: start both "
            "with the same --model or, if these are other weights of the same model, give their "
            f"revision {hello.revision[:8]} a share (pdserve revisions)"
        )

    def _check_way(self, hello: NodeHello, registry: Registry) -> None:
        """Check that the node does not come by a second address of this coordinator.

        Each stream would replace the other for ever. A stream that the node has given up is
        replaced, also where its end has not been noticed here.

        Raises:
            AlreadyAttached: it is a member by a stream that it knows of.
        """
        member = registry.find(hello.node_id)
        if member is not None and self._welcome.incarnation in hello.attached_to:
            raise AlreadyAttached(
                f"{hello.node_id} is attached to this coordinator already, by another of its "
                "addresses: one is enough"
            )

    async def _hello(self, context: Context) -> NodeHello:
        """Return the first message. Raises MalformedMessage."""
        hello = FROM_NODE.unwrap(await self._first(context))
        if not isinstance(hello, NodeHello):
            raise MalformedMessage(f"a node sends NodeHello first, not {type(hello).__name__}")
        return hello

    async def _first(self, context: Context) -> NodeMessages | None:
        within_s = self._timeouts.connect_s
        try:
            async with patience(within_s):
                return await _read(context)
        except TimeoutError as error:
            raise _heard_nothing(within_s) from error


def _shares(cluster: NodesOfModel, hello: NodeHello) -> bool:
    return cluster.revisions.share(hello.revision) is not None


def _check_id(hello: NodeHello, registry: Registry) -> None:
    """Check that no other process has this node id.

    A restarted node is refused too while its former process drains, or is not yet known to be
    dead, and tries again. If the newer one won, two processes that are given the same id by
    mistake would replace each other for ever, and each time end requests.

    Raises:
        NodeIdTaken: another process is attached under it.
    """
    member = registry.find(hello.node_id)
    if member is not None and member.hello.incarnation != hello.incarnation:
        raise NodeIdTaken(
            f"a node with the id {hello.node_id!r} is attached already, at "
            f"{member.hello.session_address}: give each node its own node_id (a restarted "
            "node is let in as soon as its former process is gone)"
        )


async def _read(context: Context) -> NodeMessages | None:
    """Return the next message, or None if the node has hung up. Raises MalformedMessage."""
    try:
        proto = await context.read()
    except DecodeError as error:
        raise MalformedMessage("a message cannot be decoded as NodeMessages") from error
    return None if proto is grpc.aio.EOF else proto


def _heard_nothing(within_s: float) -> MalformedMessage:
    return MalformedMessage(f"no message arrived for {within_s} s")
